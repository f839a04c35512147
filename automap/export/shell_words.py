"""Expands the words of a shell script: variables, arrays, defaults and arithmetic are replaced by their values.

Nothing is executed, and environment variables are not looked up. Values that are known only in a run are marked as
unknown in the word.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from automap.export.shell_arithmetic import number
from automap.export.shell_braces import written_out
from automap.export.shell_conditions import DEFAULT, MAYBE, UNSET, is_known, plain, unknown
from automap.export.shell_syntax import Node, broken, literal, place

MAX_WORK = 4 << 20
"""Largest number of characters and commands of an expanded script: more than scripts have (assumed), and read within
seconds."""
MAX_PATTERN = 1000
"""Characters of a text that a pattern is looked for in: more than names of models and files have (assumed)."""
UNDECIDED = unknown("a value that depends on a condition")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_WORDS = re.compile(r"[ \t\n]+")
_BARE, _QUOTED, _EXPANDED = "written as it is", "between double quotes", "what stands in place of a variable"
"""Context of a part of a word, which decides what of it is divided at blanks."""
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_CASES: dict[str, Callable[[str], str]] = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}
Value: TypeAlias = str | tuple[str, ...]
"""What a variable holds: a text, or the elements of an array."""
Piece: TypeAlias = tuple[str, bool | None]
"""A part of a word, and whether it stays whole; None stands between the elements of an array."""


def elements(value: Value | None) -> tuple[str, ...]:
    """The elements of an array, and of a text, which is an array of one."""
    return () if value is None else (value,) if isinstance(value, str) else value


def _scalar(value: Value) -> str:
    """What an array stands for where no element is named: its first one."""
    return value if isinstance(value, str) else (*value, "")[0]


@dataclass(slots=True, kw_only=True)
class Words:
    """The known variables of a script, and the expansion of words with them."""

    values: dict[str, Value] = field(default_factory=dict)
    """Variables by their names; elements with a key of their own by `name[key]`."""
    arguments: tuple[str, ...] | None = None
    """Those of the function that is read, or of `set --`; None where the script does not say them."""
    source: bytes = b""
    """The script that nodes are of."""
    left: int = MAX_WORK

    def spend(self, work: int) -> None:
        """Counts work, so that a script cannot double a text without end."""
        self.left -= work
        if self.left < 0:
            raise broken("the script", f"comes to more than {MAX_WORK} characters when its variables are written out")

    def shown(self, node: Node) -> str:
        """A node as it is written."""
        return self.source[place(node) : place(node, "End")].decode("utf-8", "replace")

    def fields(self, word: Node) -> list[str]:
        """The words that a written word stands for."""
        return [text for one in written_out(word, self.spend) for text in self._divided(one)]

    def _divided(self, word: Node) -> list[str]:
        """The words of a written word without braces: what stands in place of variables is divided at blanks."""
        found: list[str] = []
        is_open = False
        for text, is_whole in self.pieces(word):
            if is_whole is None:
                # The next element of an array begins a word of its own.
                is_open = False
                continue
            for at, part in enumerate([text] if is_whole else _WORDS.split(text)):
                is_open = is_open and at == 0
                if not is_whole and not plain(part):
                    continue
                if is_open:
                    found[-1] += part
                else:
                    found.append(part)
                is_open = True
        return found

    def text(self, word: Node | None) -> str:
        """The one text that a word stands for where words are not divided, as after `=`."""
        return "".join(" " if is_whole is None else text for text, is_whole in self.pieces(word or {}))

    def pieces(self, word: Node, where: str = _BARE) -> Iterator[Piece]:
        """The parts of a word."""
        for part in word.get("Parts", ()):
            yield from self._piece(part, where)

    def document(self, word: Node, delimiter: Node) -> str:
        """The text of a here-document."""
        if literal(delimiter) is None:
            return "".join(part.get("Value", "") for part in word.get("Parts", ()))
        return "".join(text for part in word.get("Parts", ()) for text, _ in self._piece(part, _QUOTED))

    def _piece(self, part: Node, where: str) -> Iterator[Piece]:
        match part["Type"]:
            case "Lit":
                signs = r"([$`\"\\])" if where == _QUOTED else "(.)"
                yield re.sub(r"\\" + signs, r"\1", part.get("Value", ""), flags=re.DOTALL), where != _EXPANDED
            case "SglQuoted":
                text = part.get("Value", "")
                if part.get("Dollar") is True:
                    text = re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), text, flags=re.DOTALL)
                yield text, True
            case "DblQuoted":
                if not part.get("Parts"):
                    yield "", True
                yield from self.pieces(part, _QUOTED)
            case "ParamExp":
                yield from self._expanded(part, where)
            case "ArithmExp":
                yield from self._spread(self.arithmetic(part["X"], self.shown(part)), where)
            case "CmdSubst":
                yield from self._spread(self._printed(part), where)
            case _:
                yield unknown(self.shown(part)), True

    def _spread(self, value: Value, where: str) -> Iterator[Piece]:
        """The parts of what a substitution stands for, each element of an array a word."""
        self.spend(sum(map(len, elements(value))))
        for at, text in enumerate(elements(value)):
            if at > 0:
                yield "", None
            yield text, where == _QUOTED

    def _expanded(self, part: Node, where: str) -> Iterator[Piece]:
        """The parts of what `$name` or `${…}` stands for."""
        sign = part.get("Exp", {}).get("Op", "")
        if sign not in (":-", "-", ":=", "=", ":+", "+"):
            yield from self._spread(self._parameter(part), where)
            return
        value, word = self._found(part), part["Exp"].get("Word", {})
        is_missing = value is None or (sign[0] == ":" and "".join(map(plain, elements(value))) == "")
        is_missing = is_missing or (isinstance(value, str) and UNSET.fullmatch(value) is not None)
        if is_missing == sign.endswith("+"):
            yield from self._spread("" if value is None or is_missing else value, where)
            return
        self.spend(1)
        pieces = list(self.pieces(word, _QUOTED if where == _QUOTED else _EXPANDED)) or [("", where == _QUOTED)]
        if not sign.endswith("+"):
            pieces = [(re.sub(r"(?<!\S)(?=\S)", DEFAULT, text) or DEFAULT, is_whole) for text, is_whole in pieces]
        if sign.endswith("="):
            self.values[part["Param"]["Value"]] = "".join(text for text, _ in pieces)
        yield from pieces

    def _printed(self, part: Node) -> str:
        """What a command in parentheses prints, where it prints words of the script."""
        statements = part.get("Stmts", [])
        if not statements:
            return ""
        command, inputs = statements[0].get("Cmd", {}), statements[0].get("Redirs", [])
        if len(statements) == 1 and command.get("Type") == "CallExpr" and not command.get("Assigns"):
            words = [text for word in command["Args"] for text in self.fields(word)]
            if words[:1] == ["echo"] and not inputs and not re.match("-[neE]+$", "".join(words[1:2])):
                return " ".join(words[1:])
            if words == ["cat"] and len(inputs) == 1 and "Hdoc" in inputs[0]:
                return self.document(inputs[0]["Hdoc"], inputs[0]["Word"]).rstrip("\n")
        return unknown(self.shown(part))

    def _value(self, name: str) -> Value | None:
        """What a variable or an argument holds; None where nothing in the script says so."""
        if name in ("@", "*"):
            given = self.arguments or ()
            return given if name == "@" else " ".join(given)
        if name == "#":
            return DEFAULT + str(len(self.arguments or ()))
        if name.isdigit() and self.arguments is not None:
            return self.arguments[int(name) - 1] if 0 < int(name[:9]) <= len(self.arguments) else ""
        return self.values.get(name)

    def _found(self, part: Node) -> Value | None:
        """What the variable of `${…}` holds, or one of its elements; None where nothing in the script says so."""
        name, index = part["Param"]["Value"], part.get("Index")
        value = self._value(name)
        if part.get("Excl"):
            target = "" if value is None or index or part.get("Names") else _scalar(value)
            value = self._value(plain(target)) if _NAME.fullmatch(plain(target)) and is_known(target) else None
        elif literal(index) == "*":
            return " ".join(elements(value))
        elif literal(index) == "@":
            return elements(value)
        elif index is not None:
            return self._element(name, index)
        return value if value is None or name == "@" else _scalar(value)

    def _element(self, name: str, index: Node) -> str | None:
        """An element of an array; None where it is not known."""
        found = self.values.get(f"{name}[{self.key(index)}]")
        if found is None:
            at, held = self.arithmetic(index, ""), elements(self.values.get(name))
            place = int(plain(at)) if is_known(at) else len(held)
            found = held[place] if -len(held) <= place < len(held) else None
        return None if found is None else _scalar(found)

    def key(self, index: Node) -> str:
        """The key of an element as a text."""
        return plain(self.text(index)) if "Parts" in index else ""

    def _parameter(self, part: Node) -> Value:
        """What `${…}` stands for, but for the forms with another word in place of the variable."""
        name, value = part["Param"]["Value"], self._found(part)
        is_all = literal(part.get("Index")) in ("@", "*") if part.get("Index") else name in ("@", "*")
        if part.get("Length"):
            held = self._value(name) if is_all else value
            if held is None or not all(map(is_known, elements(held))):
                return unknown(self.shown(part))
            return str(len(elements(held)) if is_all else len(plain(_scalar(held))))
        exp, repl, part_of = part.get("Exp", {}), part.get("Repl"), part.get("Slice")
        is_plain = not repl and not part_of and exp.get("Op", "?").removeprefix(":") == "?"
        if value is None:
            is_named = is_plain and not part.get("Excl") and not part.get("Index")
            return unknown(f"${name}" if is_named else self.shown(part))
        if is_plain:
            return value
        if part_of and not isinstance(value, str):
            given: Value | None = self._slice((*elements("$0"), *value) if name == "@" else value, part_of)
        else:
            changed = [self._changed(text, part) for text in elements(value)]
            texts = tuple(text for text in changed if text is not None)
            given = None if len(texts) < len(changed) else texts[0] if isinstance(value, str) else texts
        return unknown(self.shown(part)) if given is None else given

    def _changed(self, text: str, part: Node) -> str | None:
        """A text of which a part is taken, left out or replaced; None where the form is not read."""
        if not is_known(text) or MAYBE in text:
            return None
        mark, bare = DEFAULT if DEFAULT in text else "", plain(text)
        found: str | None = None
        if part.get("Slice"):
            letters = self._slice(tuple(bare), part["Slice"])
            found = None if letters is None else "".join(letters)
        elif repl := part.get("Repl"):
            old, new = self.text(repl["Orig"]), self.text(repl.get("With"))
            if is_known(old + new) and not re.search(r"^[#%]|[*?\[]", old):
                found = bare.replace(plain(old), plain(new), -1 if repl.get("All") else 1)
        else:
            sign, word = part["Exp"]["Op"], part["Exp"].get("Word")
            if sign in _CASES and word is None:
                found = _CASES[sign](bare)
            elif sign in ("#", "##", "%", "%%") and len(bare) <= MAX_PATTERN and is_known(pattern := self.text(word)):
                found = _without(bare, plain(pattern), sign)
        return None if found is None else mark + found

    def _slice(self, whole: tuple[str, ...], part_of: Node) -> tuple[str, ...] | None:
        """`${name:offset:length}`: some elements or letters from an offset on; None if offset or length is not
        known."""
        numbers = [self.arithmetic(part_of[key], "") for key in ("Offset", "Length") if part_of.get(key)]
        if not all(map(is_known, numbers)):
            return None
        start = 0 if not part_of.get("Offset") else int(plain(numbers[0]))
        start = max(0, len(whole) + start) if start < 0 else start
        if not part_of.get("Length"):
            return whole[start:]
        count = int(plain(numbers[-1]))
        return whole[start : start + count] if count >= 0 else whole[start:count]

    def arithmetic(self, node: Node, shown: str) -> str:
        """The value of an arithmetic expression, which is written as it is shown where it is not known."""
        touched: list[str] = []

        def operand(word: Node) -> str:
            name = literal(word)
            value = self._value(name) if name is not None and _NAME.fullmatch(name) else self.text(word)
            touched.append("" if value is None else _scalar(value))
            if value is None or not is_known(touched[-1]):
                raise ValueError("not known")
            return plain(touched[-1])

        def marked(value: int) -> str:
            return f"{DEFAULT if any(DEFAULT in text for text in touched) else ''}{value}"

        def assign(name: str, value: int | None) -> None:
            self.values[name] = UNDECIDED if value is None else marked(value)

        self.spend(1)
        try:
            return marked(number(node, operand, assign))
        except (ValueError, ArithmeticError):
            return unknown(shown)

    def assign(self, node: Node) -> None:
        """Follows `name=value`, also of arrays and of their elements."""
        name = node["Name"]["Value"]
        value: Value
        if "Array" in node:
            found = list[str]()
            for element in node["Array"].get("Elems", ()):
                if element.get("Index"):
                    self.values[f"{name}[{self.key(element['Index'])}]"] = self.text(element.get("Value"))
                    found = [unknown(f"the elements of {name}")]
                else:
                    found += self.fields(element["Value"])
            value = tuple(found)
        else:
            value = self.text(node.get("Value"))
        self.spend(sum(map(len, elements(value))))
        if node.get("Index"):
            self._assign_element(name, node, _scalar(value))
        elif not node.get("Append"):
            self.values[name] = value
        else:
            before = self.values.get(name, "")
            if isinstance(value, tuple):
                self.values[name] = (*filter(None, elements(before)), *value)
            else:
                self.values[name] = (
                    before + value if isinstance(before, str) else (_scalar(before) + value, *before[1:])
                )
            self.spend(sum(map(len, elements(self.values[name]))))

    def _assign_element(self, name: str, node: Node, value: str) -> None:
        """Follows `name[index]=value`: at the end or within an array, or with a key of its own."""
        held, at = elements(self.values.get(name)), self.arithmetic(node["Index"], "")
        place = int(plain(at)) if is_known(at) else -1
        if 0 <= place <= len(held) and not node.get("Append"):
            self.values[name] = (*held[:place], value, *held[place + 1 :])
            return
        key = self.key(node["Index"])
        if key and not node.get("Append"):
            self.values[f"{name}[{key}]"] = value
        self.values[name] = UNDECIDED


def _without(text: str, pattern: str, sign: str) -> str:
    """A text without its shortest or longest beginning (`#`) or end (`%`) that is like a pattern."""
    cuts = range(len(text) + 1) if sign in ("#", "%%") else range(len(text), -1, -1)
    for cut in cuts:
        if fnmatch.fnmatchcase(text[:cut] if sign[0] == "#" else text[cut:], pattern):
            return text[cut:] if sign[0] == "#" else text[:cut]
    return text
