"""Scripts of the shell read without being run: the commands that they start, with variables written out.

Assignments, arrays, defaults, arithmetic and conditions are followed; nothing is executed, and nothing of the
environment is looked up. What only a run could tell stays in the words as a mark: what a program prints, variables
that the script does not set, and what depends on a condition that cannot be decided.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from automap.export.shell_arithmetic import number
from automap.export.shell_conditions import DEFAULT, MARKS, MAYBE, UNSET, holds, is_known, plain, unknown
from automap.export.shell_syntax import (
    ASSIGNED,
    MAX_DEPTH,
    TESTS,
    Arithmetic,
    Block,
    Case,
    Chain,
    Command,
    Function,
    If,
    Loop,
    Node,
    broken,
    closing,
    is_test_command,
    leaves,
    parse,
    words_of,
)

MAX_WORK = 4 << 20
"""Characters and commands that a script may come to: more than scripts have (assumed), and read in seconds."""
_UNDECIDED = unknown("a value that depends on a condition")
_NAME = re.compile(r"\$(\w+|[@*#?$!-])")
_BRACED = re.compile(r"(#?)(\w+|[@*#?$!-])(\[[^]]*\])?(:?[-=+?]|)(.*)", re.DOTALL)
_SHELLS = {"bash", "sh", "zsh", "sbatch", "srun", "ssh", "pdsh", "qsub", "bsub", "eval"}
_PRINTS = {"echo", "printf", "export", "declare", "local", "readonly", "typeset"}
Value = str | tuple[str, ...]
"""What a variable holds: a text, or the elements of an array."""


def commands(text: str) -> tuple[list[list[str]], list[str]]:
    """The commands that a script starts, and the words of all its variables, where no command has them.

    Raises:
        PlanError: it is no script, or comes to too much.
    """
    found = _Reading()
    found.run(parse(text.replace("\r\n", "\n").translate(MARKS)))
    if not any(word.startswith("--") for words in found.commands for word in words):
        for body in found.bodies:
            found.script(body)
    rest = [word for value in found.values.values() for text in _elements(value) for word in text.split()]
    return found.commands, rest


def _elements(value: Value) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


@dataclass(slots=True)
class _Reading:
    """What is known while a script is read."""

    values: dict[str, Value] = field(default_factory=dict)
    functions: dict[str, Block] = field(default_factory=dict)
    arguments: tuple[str, ...] | None = None
    """Those of the function that is read; None outside of functions."""
    commands: list[list[str]] = field(default_factory=list)
    bodies: list[str] = field(default_factory=list)
    """Here-documents that no shell gets."""
    left: int = MAX_WORK
    depth: int = 0

    def spend(self, work: int) -> None:
        """Counts work, so that a script cannot double a text without end."""
        self.left -= work
        if self.left < 0:
            raise broken("the script", f"comes to more than {MAX_WORK} characters when its variables are written out")

    def run(self, node: Node) -> bool | None:
        """Follows commands; returns whether they succeed, None where that cannot be told."""
        self.spend(1)
        self.depth += 1
        if self.depth > 2 * MAX_DEPTH:
            raise broken("the script", "calls itself, or is nested too deeply")
        try:
            return self._run(node)
        finally:
            self.depth -= 1

    def _run(self, node: Node) -> bool | None:
        held: bool | None = None
        match node:
            case Block(nodes):
                for one in nodes:
                    held = self.run(one)
            case Chain(parts):
                held = self._chain(parts)
            case If(branches):
                self._choose([(functools.partial(self.run, condition), body) for condition, body in branches])
            case Case(word, branches):
                chosen = " ".join(self.fields(word))
                self._choose([(functools.partial(self._matches, chosen, p), body) for p, body in branches])
            case Loop():
                self._loop(node)
            case Function(name, body):
                self.functions[name] = body
            case Arithmetic(text):
                held = self._let(text)
            case Command(words, bodies):
                held = self._command(words, bodies)
        return held

    def _chain(self, parts: Sequence[tuple[str, Node]]) -> bool | None:
        held: bool | None = True
        is_test = False
        for join, node in parts:
            run = functools.partial(self._turned, node, "!" in join)
            kind = join.removesuffix("!").strip()
            if kind not in ("&&", "||"):
                held = run()
            elif held is None and is_test:
                self._perhaps([run, lambda: None])
            elif held is (kind == "||") or (held is None and kind == "||"):
                # Programs are taken to succeed.
                continue
            elif not (kind == "||" and leaves(node)):
                held = run()
            is_test = is_test_command(node)
        return held

    def _turned(self, node: Node, is_turned: bool) -> bool | None:
        held = self.run(node)
        return (not held) if is_turned and held is not None else held

    def _choose(self, branches: Sequence[tuple[Callable[[], bool | None], Block]]) -> None:
        """Follows the branch that is taken, or all that may be; one that leaves the script is not taken."""
        possible: list[Callable[[], object]] = []
        for decide, body in branches:
            held = decide()
            if held is False or leaves(body):
                continue
            possible.append(functools.partial(self.run, body))
            if held is True:
                break
        else:
            possible.append(lambda: None)
        self._perhaps(possible)

    def _perhaps(self, ways: Sequence[Callable[[], object]]) -> None:
        """Follows several ways, of which one is taken."""
        before, after = self.values, []
        for way in ways:
            self.spend(len(before))
            self.values = dict(before)
            way()
            after.append(self.values)
        self.values = functools.reduce(_joined, after)

    def _loop(self, node: Loop) -> None:
        run = functools.partial(self.run, node.body)
        if node.condition is not None:
            if self.run(node.condition) is True:
                self._perhaps([run, lambda: None])
            return
        words = [word for raw in node.words for word in self.fields(raw)]
        if words:
            self.values[node.name] = words[0] if len(words) == 1 else unknown(f"each {node.name} of a loop")
            run() if len(words) == 1 else self._perhaps([run, lambda: None])

    def _let(self, text: str) -> bool | None:
        found = re.fullmatch(r"\s*(\w+)\s*([-+*/%]?)=([^=].*)", text, re.DOTALL)
        if found:
            value = f"{found[1]} {found[2]} ({found[3]})" if found[2] else found[3]
            self.values[found[1]] = self.arithmetic(value)
        elif step := re.search(r"(\w+)\s*(?:\+\+|--)|(?:\+\+|--)\s*(\w+)", text):
            self.values[step[1] or step[2]] = _UNDECIDED
        value = self.arithmetic(text)
        return plain(value) != "0" if is_known(value) else None

    def _command(self, words: tuple[str, ...], bodies: tuple[str, ...]) -> bool | None:
        start = 0
        while start < len(words) and ASSIGNED.match(words[start]):
            start += 1
        if start == len(words):
            for word in words:
                self._assign(word)
            return True
        rest = words[start:]
        if rest[0] in TESTS:
            is_pattern = rest[0] == "[["
            texts = map(self.fields, rest)
            return holds([" ".join(t) for t in texts] if is_pattern else [word for text in texts for word in text])
        if rest[0] in ("export", "declare", "local", "readonly", "typeset"):
            for word in rest[1:]:
                if ASSIGNED.match(word):
                    self._assign(word)
            return True
        if rest[0] == "let":
            return self._let(" ".join(text for word in rest[1:] for text in self.fields(word)))
        self._start([field for word in rest for field in self.fields(word)], bodies)
        return None

    def _start(self, words: list[str], bodies: tuple[str, ...]) -> None:
        """Follows a program: a function of the script, a shell with a script of its own, or another one."""
        name = plain(words[0]).rpartition("/")[2] if words else ""
        if name in self.functions:
            before, self.arguments = self.arguments, tuple(words[1:])
            self.run(self.functions[name])
            self.arguments = before
            return
        if name == "unset":
            for word in words[1:]:
                self.values.pop(word, None)
        if name == "eval":
            self.script(" ".join(words[1:]))
        elif name not in _PRINTS and words:
            # A text with options is a script for another shell, as after `bash -c` or the name of a host.
            for word in words:
                if re.match(r"[^-].*\s--\w", word, re.DOTALL):
                    self.script(word)
            self.commands.append(words)
        for body in bodies:
            if name in _SHELLS:
                self.script(body)
            else:
                self.bodies.append(body)

    def script(self, text: str) -> None:
        """Follows a text as a script of its own."""
        self.spend(len(text))
        self.run(parse(text))

    def _assign(self, word: str) -> None:
        found = ASSIGNED.match(word)
        assert found is not None
        name, raw, adds = found[1], word[found.end() :], found[0].endswith("+=")
        value: Value
        if raw.startswith("("):
            value = tuple(field for item in words_of(raw[1:-1]) for field in self.fields(item))
        else:
            value = "".join(text for text, _ in self.pieces(raw))
        if "[" in found[0]:
            value = _UNDECIDED
        elif adds:
            before = self.values.get(name, "")
            if isinstance(value, tuple):
                value = (*filter(None, _elements(before)), *value)
            else:
                value = before + value if isinstance(before, str) else (before[0] + value, *before[1:])
        self.spend(sum(map(len, _elements(value))))
        self.values[name] = value

    def fields(self, raw: str) -> list[str]:
        """The words that a written word stands for."""
        found: list[str] = []
        is_open = False
        for text, is_quoted in self.pieces(raw):
            if is_quoted is None:
                # The next element of an array begins a word of its own.
                is_open = False
                continue
            parts = [text] if is_quoted else re.split(r"[ \t\n]+", text)
            for at, part in enumerate(parts):
                if at > 0:
                    is_open = False
                if not part and not is_quoted:
                    continue
                if is_open:
                    found[-1] += part
                else:
                    found.append(part)
                is_open = True
        return found

    def pieces(self, raw: str) -> Iterator[tuple[str, bool | None]]:
        """The parts of a written word: texts, and whether they stay whole; None stands between elements of an array."""
        place = 0
        while place < len(raw):
            letter = raw[place]
            if letter == "\\":
                if raw[place + 1 : place + 2] != "\n":
                    yield raw[place + 1 : place + 2], True
                place += 2
            elif letter == "'":
                end = closing(raw, place)
                yield raw[place + 1 : end - 1], True
                place = end
            elif letter == '"':
                end = closing(raw, place)
                yield from self._quoted(raw[place + 1 : end - 1])
                place = end
            elif letter in "$`":
                place = yield from self._elements_of(raw, place, is_whole=False)
            else:
                end = place + 1
                while end < len(raw) and raw[end] not in "\\'\"$`":
                    end += 1
                yield raw[place:end], True
                place = end

    def _quoted(self, raw: str) -> Iterator[tuple[str, bool | None]]:
        """The parts of what stands between double quotes."""
        place, is_empty = 0, not raw
        while place < len(raw):
            if raw[place] == "\\" and raw[place + 1 : place + 2] in tuple('$`"\\\n'):
                if raw[place + 1] != "\n":
                    yield raw[place + 1], True
                place += 2
            elif raw[place] in "$`":
                place = yield from self._elements_of(raw, place, is_whole=True)
            else:
                end = place + 1
                while end < len(raw) and raw[end] not in "\\$`":
                    end += 1
                yield raw[place:end], True
                place = end
        if is_empty:
            yield "", True

    def _elements_of(self, raw: str, place: int, *, is_whole: bool) -> Generator[tuple[str, bool | None], None, int]:
        """The parts of what a substitution stands for, each element of an array a word; returns the place behind it."""
        end, value = self._substituted(raw, place)
        for at, text in enumerate(_elements(value)):
            if at > 0:
                yield "", None
            yield text, is_whole
        return end

    def _substituted(self, raw: str, place: int) -> tuple[int, Value]:
        """The place behind a substitution, and its value: an array where all elements are asked for."""
        end = closing(raw, place)
        inner = raw[place + 2 : end - 1]
        value: Value
        if raw.startswith("$((", place) and inner.endswith(")"):
            value = self.arithmetic(inner[1:-1])
        elif raw.startswith("${", place):
            value = self._braced(inner)
        elif raw.startswith("$'", place):
            value = inner
        elif raw.startswith(("$(", "`"), place):
            value = unknown(f"{raw[place:end]}")
        elif found := _NAME.match(raw, place):
            # Digits name one argument each.
            name = found[1][:1] if found[1][0].isdigit() else found[1]
            end, value = place + 1 + len(name), self._looked_up(name, f"${name}")
        else:
            value = "$"
        self.spend(sum(map(len, _elements(value))))
        return end, value

    def _looked_up(self, name: str, shown: str) -> Value:
        found = self._value(name)
        if found is None:
            return unknown(f"{shown}")
        return found if name == "@" or isinstance(found, str) else (*found, "")[0]

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

    def _braced(self, inner: str) -> Value:
        found = _BRACED.fullmatch(inner)
        if found is None or self.depth > MAX_DEPTH:
            return unknown(f"${{{inner}}}")
        is_count, name, index, operator, rest = found.groups()
        value = self._value(name)
        if index in ("[@]", "[*]"):
            value = () if value is None else _elements(value)
            if index == "[*]" and not is_count:
                value = " ".join(value)
        elif index is not None:
            place = plain("".join(text for text, _ in self.pieces(index[1:-1])))
            elements = () if value is None else _elements(value)
            value = elements[int(place)] if place.isdigit() and int(place[:9]) < len(elements) else None
        elif isinstance(value, tuple):
            value = value if name == "@" else (*value, "")[0]
        if is_count or (not operator and rest):
            return str(len(value)) if index and is_count and value is not None else unknown(f"${{{inner}}}")
        is_missing = value is None or (operator.startswith(":") and value in ("", ()))
        if isinstance(value, str) and UNSET.fullmatch(value):
            is_missing = True
        if operator.endswith(("-", "=")) and is_missing:
            self.depth += 1
            filled = DEFAULT + "".join(text for text, _ in self.pieces(rest))
            self.depth -= 1
            if operator.endswith("="):
                self.values[name] = filled
            return filled
        if operator.endswith("+"):
            return "" if is_missing else "".join(text for text, _ in self.pieces(rest))
        return unknown(f"${name}") if value is None else value

    def arithmetic(self, text: str) -> str:
        """The value of an arithmetic expression."""
        written = "".join(piece for piece, _ in self.pieces(text))
        values = {name: self._looked_up(name, f"${name}") for name in re.findall(r"[A-Za-z_]\w*", written)}
        texts = {name: str(value) for name, value in values.items()}
        mark = DEFAULT if DEFAULT in written or any(DEFAULT in value for value in texts.values()) else ""
        if not all(map(is_known, (written, *texts.values()))):
            return unknown(f"$(({plain(text)}))")
        found = number(re.sub(r"[A-Za-z_]\w*", lambda match: plain(texts[match[0]]) or "0", plain(written)))
        return unknown(f"$(({plain(text)}))") if found is None else f"{mark}{found}"

    def _matches(self, word: str, patterns: Sequence[str]) -> bool | None:
        """Whether one of the patterns of a case matches."""
        word = UNSET.sub("", word)
        if all(pattern == "*" for pattern in patterns):
            return True
        if not is_known(word):
            return None
        shown = [" ".join(self.fields(pattern)) for pattern in patterns]
        return any(fnmatch.fnmatchcase(plain(word), plain(pattern)) for pattern in shown)


def _joined(one: dict[str, Value], other: dict[str, Value]) -> dict[str, Value]:
    """What is known after one of two ways was taken."""
    found: dict[str, Value] = {}
    for name in {**one, **other}:
        first, second = one.get(name, ""), other.get(name, "")
        if first == second:
            found[name] = first
        elif isinstance(first, tuple) or isinstance(second, tuple) or " --" in f" {first} {second}":
            texts = [
                _elements(value) if isinstance(value, tuple) else tuple(value.split()) for value in (first, second)
            ]
            same = next((n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
            words = (*texts[0][:same], *(MAYBE + word for text in texts for word in text[same:]))
            is_array = isinstance(first, tuple) or isinstance(second, tuple)
            found[name] = words if is_array else " ".join(words)
        else:
            found[name] = _UNDECIDED
    return found
