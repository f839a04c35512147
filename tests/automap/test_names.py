import re

from hypothesis import given, settings
from hypothesis import strategies as st

from automap.globs import matches, matches_operator, most_specific, select


def test_a_star_stays_inside_a_component():
    assert matches("h.*/Add", "h.11/Add")
    assert not matches("h.*/Add", "h.11.attn/Add")
    assert matches("h.**", "h.11.attn/Add")
    assert matches("**", "anything.at/all")
    assert matches("a[0]", "a[0]")
    assert not matches("a?c", "a.c")
    assert select("w*", ["w1", "x", "w.2"]) == ["w1"]


def test_the_most_specific_glob_wins_and_the_name_beats_all():
    globs = ["**", "h.*.mlp.**", "h.*.mlp.up/MatMul", "h.3.mlp.up/MatMul"]
    assert most_specific(globs, "h.3.mlp.up/MatMul") == globs[3]
    assert most_specific(globs, "h.4.mlp.up/MatMul") == globs[2]
    assert most_specific(globs, "h.4.mlp.down/MatMul") == globs[1]
    assert most_specific(globs, "x") == "**"
    assert most_specific([], "x") is None


def test_a_module_names_all_that_is_in_it():
    names = ["h.0.mlp/Add", "h.0.mlp.up/MatMul", "h.0.mlp.up/Add_1", "h.1.mlp.up/MatMul", "h.0.mlp_2/Add", "h.0/Add"]
    assert select("h.0.mlp", names) == names[:3]
    assert select("h.*.mlp.up", names) == names[1:4]
    assert select("h.*", names) == names
    assert not matches("h.*.ml", names[0])
    assert not matches_operator("h.*.mlp", names[0])
    assert matches_operator("h.*.mlp/*", names[0])


def test_the_name_of_an_operator_names_it_alone():
    assert select("fire2", ["fire2", "fire2/relu"]) == ["fire2"]


def by_states(glob: str, name: str) -> bool:
    """The meaning of a glob, step by step: every place in it that the characters read so far may have led to."""
    tokens = re.findall(r"\*\*|\*|\?|[^*?]", glob)

    def skipping(places: set[int]) -> set[int]:
        for place in range(len(tokens)):
            if place in places and tokens[place] in ("*", "**"):
                places.add(place + 1)
        return places

    places = skipping({0})
    for c in name:
        ahead = set()
        for place in places - {len(tokens)}:
            token = tokens[place]
            if token == "**" or (token == "*" and c not in "./"):
                ahead.add(place)
            elif token == c or (token == "?" and c not in "./"):
                ahead.add(place + 1)
        places = skipping(ahead)
    return len(tokens) in places


@settings(max_examples=500)
@given(
    glob=st.lists(st.sampled_from(["a", "b", ".", "/", "*", "**", "?"]), min_size=1, max_size=8).map("".join),
    name=st.text("ab./", max_size=9),
)
def test_a_glob_means_what_its_characters_say(glob, name):
    glob = re.sub(r"\*{3,}", "**", glob)
    assert matches_operator(glob, name) == by_states(glob, name)


def test_no_glob_takes_for_ever():
    assert not matches("**a" * 20 + "b", "a" * 4000) and not matches("*a" * 20 + "b", "a" * 4000)
