"""JSON from users: what is read is finite, Unicode, without a key twice and not too deep; all else names its path."""

import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automap.documents import MAX_DEPTH, check_document, joined, read_document, read_file
from automap.errors import ClusterError, PlanError
from ir.errors import UserError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
DOCUMENTS = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**300), 10**300),
        st.floats(allow_nan=False, allow_infinity=False),
        TEXTS,
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


@given(DOCUMENTS, st.booleans())
def test_what_json_can_hold_is_read_as_it_is(document, escaped):
    text = json.dumps(document, ensure_ascii=escaped)
    assert read_document(text) == read_document(text.encode()) == document


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + 400 * "0", 5000 * "9"])
@pytest.mark.parametrize(("text", "path"), [("%s", "document"), ('{"a": [1, {"b": %s}]}', "a[1].b")])
def test_numbers_without_end_are_refused(number, text, path):
    with pytest.raises(UserError, match="finite") as caught:
        read_document(text % number)
    assert caught.value.field == path


@pytest.mark.parametrize(
    ("text", "path", "word"),
    [
        (r'{"a": ["\ud800"]}', "c.a[0]", "surrogate"),
        (r'{"a": {"\udfff": 1}}', "c.a", "surrogate"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "c.a.b", "twice"),
        ("[" * 100 + "]" * 100, "c" + MAX_DEPTH * "[0]", "deep"),
        ("[" * 200_000, "c", "deep"),
        ('{"a": 1', "c", "JSON"),
        ("", "c", "JSON"),
        ("1 2", "c", "JSON"),
        (b"\xff\xfe", "c", "UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "c", "UTF-8"),
    ],
)
def test_the_fault_is_named_by_its_path(text, path, word):
    with pytest.raises(ClusterError, match=word) as caught:
        read_document(text, field="c", error=ClusterError)
    assert caught.value.field == path[:197] + "..." if len(path) > 200 else path
    assert caught.value.repair
    assert caught.value.value


def test_both_halves_of_a_pair_are_one_character():
    assert read_document(r'"\ud83d\ude00"') == "😀"


def test_what_python_hands_in_is_checked_likewise():
    for value in (math.nan, -math.inf, 10**400, "\ud800"):
        with pytest.raises(UserError) as caught:
            check_document({"a": ({"b": value},)}, field="hints")
        assert caught.value.field == "hints.a[0].b"
    loop = []
    loop.append(loop)
    with pytest.raises(UserError, match="deep"):
        check_document(loop)


def test_files_that_cannot_be_read_are_refused_by_their_path(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(ClusterError, match="cannot be read") as caught:
        read_file(path, field="cluster", error=ClusterError)
    assert caught.value.value == str(path)
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_file(path, field="cluster", error=ClusterError) == {"a": 1}
    path.write_text("{")
    with pytest.raises(ClusterError, match="cannot be read") as caught:
        read_file(path, field="cluster", error=ClusterError)
    assert caught.value.value == str(path)


@pytest.mark.parametrize("text", ["", b"", " \n", b"\n"])
def test_an_empty_document_is_called_so(text):
    with pytest.raises(UserError, match="it is empty"):
        read_document(text)


def test_a_dash_is_stdin(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"a": 1}')))
    assert read_file(Path("-"), field="plan", error=PlanError) == {"a": 1}


def test_an_empty_key_has_a_name_in_errors():
    assert joined("", "") == '""'
    assert joined("cluster", "") == 'cluster.""'
