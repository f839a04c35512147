"""Reads shell scripts without running them: finds the commands that they start, with variables replaced by values.

Assignments, conditions, loops, functions and scripts within scripts are interpreted; no program is executed. Values
that are known only in a run are marked as unknown in the words: the output of programs, variables that the script does
not set, and values that depend on a condition that cannot be decided.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from automap.errors import PlanError
from automap.export.shell_conditions import (
    MARKS,
    MAYBE,
    UNSET,
    Outcome,
    both,
    compared,
    holds,
    is_known,
    negated,
    plain,
    unknown,
)
from automap.export.shell_syntax import MAX_DEPTH, Node, broken, leaves, literal, parse, place
from automap.export.shell_words import UNDECIDED, Value, Words, elements

_PARSED = 1 << 14
"""Amount of work that counts for each start of the parser, so that at most 256 scripts within a script are read."""
_SHELLS = {"bash", "sh", "zsh", "sbatch", "srun", "ssh", "pdsh", "qsub", "bsub", "eval"}
_PRINTS = {"echo", "printf"}
_SETS = {"read", "mapfile", "readarray", "getopts", "printf"}
"""Commands that give variables values."""
_SET_OPTION = re.compile(r"-\w*[adinNptu]|-v")
"""Their options that have a value of their own, where it is the next word."""
_SCOPED = {"local", "declare", "typeset"}
Way = Callable[[], object]
Result = TypeVar("Result")


def commands(
    text: str, values: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[list[str]], list[str], list[str]]:
    """Reads a script.

    Args:
        text: the script.
        values: known values of variables that are set outside the script.

    Returns:
        The words of each command that the script starts; the words in the final values of all variables, which help
        where no command is started; and the here-documents that no shell gets as a script.

    Raises:
        PlanError: it is not a shell script, or takes too much work to read.
    """
    found = _Reading(values=dict(values))
    try:
        found.script(text.replace("\r\n", "\n").translate(MARKS))
        if not any(word.startswith("--") for words in found.commands for word in words):
            for body in found.bodies:
                found.perhaps_script(body)
    except RecursionError:
        raise broken("the script", "is nested too deeply") from None
    rest = [word for value in found.values.values() for text in elements(value) for word in text.split()]
    return found.commands, rest, found.bodies


@dataclass(slots=True, kw_only=True)
class _Reading(Words):
    """The interpreter of a script: its functions and variables, and the commands found so far."""

    functions: dict[str, tuple[bytes, Node]] = field(default_factory=dict)
    """The script and the body of each function."""
    own: list[dict[str, Value | None]] = field(default_factory=list)
    """For each function that is being read: the values that its local variables had before."""
    commands: list[list[str]] = field(default_factory=list)
    bodies: list[str] = field(default_factory=list)
    """Here-documents that no shell gets."""
    depth: int = 0

    def script(self, text: str) -> None:
        """Follows a text as a script of its own.

        Raises:
            PlanError: it is none.
        """
        self.spend(len(text) + _PARSED)
        statements = parse(text)
        with self._within(text.encode("utf-8", "replace")):
            self.block(statements)

    def perhaps_script(self, text: str) -> None:
        """Follows a text as a script where it is one."""
        try:
            self.script(text)
        except PlanError:
            self.spend(len(text))

    @contextmanager
    def _within(self, source: bytes) -> Iterator[None]:
        before, self.source = self.source, source
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise broken("the script", "calls itself, or is nested too deeply")
        try:
            yield
        finally:
            self.source = before
            self.depth -= 1

    def block(self, statements: Sequence[Node]) -> Outcome:
        """Follows statements one after another."""
        found = Outcome.HOLDS
        for statement in statements:
            found = self.run(statement)
        return found

    def run(self, statement: Node) -> Outcome:
        """Follows a statement; returns how it ends."""
        self.spend(1)
        found = self._run(statement.get("Cmd", {}), statement.get("Redirs", []))
        return Outcome.of(negated(found.held)) if statement.get("Negated") else found

    def _run(self, node: Node, inputs: Sequence[Node]) -> Outcome:
        match node.get("Type"):
            case "CallExpr":
                return self._call(node, inputs)
            case "BinaryCmd":
                return self._joined(node)
            case "Block":
                return self.block(node["Stmts"])
            case "Subshell":
                return self._apart(lambda: self.block(node["Stmts"]))
            case "IfClause":
                self._choose(list(self._branches(node)))
            case "CaseClause":
                self._choose(list(self._cases(node)))
            case "ForClause" | "WhileClause":
                self._loop(node)
            case "FuncDecl":
                self.functions[node["Name"]["Value"]] = (self.source, node["Body"])
            case "DeclClause":
                self._declare(node)
            case "ArithmCmd":
                return self._decided(node["X"])
            case "LetClause":
                return [self._let(expression) for expression in node["Exprs"]][-1]
            case "TestClause":
                return Outcome.of(self._test(node["X"]))
            case "TimeClause" if node.get("Stmt"):
                return self.run(node["Stmt"])
        return Outcome.HOLDS

    def _apart(self, way: Callable[[], Result]) -> Result:
        """Follows a way in a shell of its own, whose variables end with it."""
        before = self.values
        self.spend(len(before))
        self.values = dict(before)
        found = way()
        self.values = before
        return found

    def _joined(self, node: Node) -> Outcome:
        """Follows two statements that are joined by `&&`, `||` or a pipe."""
        right = functools.partial(self.run, node["Y"])
        if node["Op"] not in ("&&", "||"):
            self._apart(functools.partial(self.run, node["X"]))
            return self._apart(right)
        found = self.run(node["X"])
        ended = Outcome.HOLDS if found is Outcome.RAN else found
        if ended is (Outcome.FAILS if node["Op"] == "&&" else Outcome.HOLDS):
            return ended
        if leaves([node["Y"]]):
            return Outcome.OPEN
        if ended is not Outcome.OPEN:
            return right()
        self._perhaps([right, lambda: None])
        return Outcome.OPEN

    def _branches(self, node: Node) -> Iterator[tuple[Callable[[], bool | None], list[Node]]]:
        """The conditions of an if, each with what is done where it holds."""
        while node:
            yield functools.partial(self._condition, node.get("Cond", [])), node["Then"]
            node = node.get("Else", {})

    def _condition(self, statements: Sequence[Node]) -> bool | None:
        return self.block(statements).held

    def _cases(self, node: Node) -> Iterator[tuple[Callable[[], bool | None], list[Node]]]:
        """The patterns of a case, each with what is done where they match."""
        chosen = self.text(node["Word"])
        for item in node.get("Items", ()):
            yield functools.partial(self._matches, chosen, item["Patterns"]), item.get("Stmts", [])

    def _matches(self, word: str, patterns: Sequence[Node]) -> bool | None:
        """Whether one of the patterns of a case matches."""
        word = UNSET.sub("", word)
        if any(literal(pattern) == "*" for pattern in patterns):
            return True
        if not is_known(word):
            return None
        return any(fnmatch.fnmatchcase(plain(word), plain(self.text(pattern))) for pattern in patterns)

    def _choose(self, branches: Iterable[tuple[Callable[[], bool | None], list[Node]]]) -> None:
        """Follows the branch that is taken, or all that may be; one that leaves the script is not taken."""
        possible: list[Way] = []
        for decide, body in branches:
            held = decide()
            if held is False or leaves(body):
                continue
            possible.append(functools.partial(self.block, body))
            if held is True:
                break
        else:
            possible.append(lambda: None)
        self._perhaps(possible)

    def _perhaps(self, ways: Sequence[Way]) -> None:
        """Follows several ways, of which one is taken."""
        before, after = self.values, []
        for way in ways:
            self.spend(len(before))
            self.values = dict(before)
            way()
            after.append(self.values)
        self.values = functools.reduce(_merged, after)

    def _loop(self, node: Node) -> None:
        body = functools.partial(self.block, node["Do"])
        loop = node.get("Loop", {})
        if node["Type"] == "WhileClause":
            if self.block(node["Cond"]).held is not bool(node.get("Until")):
                self._perhaps([body, lambda: None])
            return
        if loop["Type"] == "CStyleLoop":
            if loop.get("Init"):
                self.arithmetic(loop["Init"], "")
            self._perhaps([body, lambda: None])
            return
        items = loop.get("Items") or ([] if loop.get("InPos") else None)
        words = list(self.arguments or ()) if items is None else [text for item in items for text in self.fields(item)]
        if words:
            name = loop["Name"]["Value"]
            self.values[name] = words[0] if len(words) == 1 else unknown(f"each {name} of a loop")
            body() if len(words) == 1 else self._perhaps([body, lambda: None])

    def _decided(self, expression: Node) -> Outcome:
        """Follows an arithmetic command, which succeeds where its value is not 0."""
        value = self.arithmetic(expression, "")
        return Outcome.of(plain(value) != "0") if is_known(value) else Outcome.OPEN

    def _let(self, expression: Node) -> Outcome:
        """Follows an expression of `let`, which may be in quotes."""
        if "Parts" not in expression:
            return self._decided(expression)
        text = f"(({self.text(expression)}))"
        self.spend(len(text) + _PARSED)
        with self._within(text.encode("utf-8", "replace")):
            return self.block(parse(text))

    def _test(self, node: Node) -> bool | None:
        """Whether the condition of `[[` holds; None where that cannot be told."""
        sign = node.get("Op", "")
        if node["Type"] == "ParenTest" or sign == "!":
            held = self._test(node["X"])
            return held if sign != "!" else negated(held)
        if sign in ("&&", "||"):
            one, other = self._test(node["X"]), self._test(node["Y"])
            return both(one, other) if sign == "&&" else negated(both(negated(one), negated(other)))
        words = [self.text(node[side]) for side in ("X", "Y") if side in node]
        if node["Type"] == "Word":
            words = [self.text(node)]
        at = 1 if len(words) == 2 else 0
        return compared([*words[:at], *([sign] if sign else []), *words[at:]])

    def _declare(self, node: Node) -> None:
        """Follows `export`, `local` and their like."""
        for argument in node.get("Args", ()):
            name = argument.get("Name", {}).get("Value")
            if name is not None and node["Variant"]["Value"] in _SCOPED and self.own:
                self.own[-1].setdefault(name, self.values.get(name))
            if name is not None and not argument.get("Naked"):
                self.assign(argument)

    def _call(self, node: Node, inputs: Sequence[Node]) -> Outcome:
        """Follows a simple command."""
        assigned = node.get("Assigns", [])
        # A placeholder such as <path> is not a redirection to an option.
        lost = [item["Word"] for item in inputs if (literal(item.get("Word")) or "").startswith("--")]
        written = sorted([*node.get("Args", []), *lost], key=place)
        words = [text for word in written for text in self.fields(word)]
        if not written:
            for one in assigned:
                self.assign(one)
            return Outcome.HOLDS
        before = {one["Name"]["Value"]: self.values.get(one["Name"]["Value"]) for one in assigned}
        for one in assigned:
            self.assign(one)
        found = self._start(words, inputs) if words else Outcome.HOLDS
        self._restore(before)
        return found

    def _restore(self, before: Mapping[str, Value | None]) -> None:
        for name, value in before.items():
            if value is None:
                self.values.pop(name, None)
            else:
                self.values[name] = value

    def _start(self, words: list[str], inputs: Sequence[Node]) -> Outcome:
        """Follows a command: a function of the script, one of the shell's own, or a program."""
        name = plain(words[0]).rpartition("/")[2]
        documents = [self.document(item["Hdoc"], item["Word"]) for item in inputs if "Hdoc" in item]
        if name in self.functions:
            return self._function(name, words)
        if name in (":", "true", "false"):
            return Outcome.of(name != "false")
        if name in ("[", "test"):
            return Outcome.of(holds(words))
        if name in _SETS and (name != "printf" or "-v" in words):
            return self._set(name, words, [*documents, *(self.text(i["Word"]) for i in inputs if i["Op"] == "<<<")])
        if name == "unset":
            for word in words[1:]:
                self.values.pop(word, None)
        elif name == "shift" and self.arguments is not None:
            count = plain(words[1]) if len(words) > 1 else "1"
            self.arguments = self.arguments[int(count) if count.isdecimal() else 0 :]
        elif name == "set" and "--" in words:
            self.arguments = tuple(words[words.index("--") + 1 :])
        elif name == "eval":
            self.script(" ".join(words[1:]))
        elif name not in _PRINTS:
            self._program(name, words)
        for body in documents:
            if name in _SHELLS:
                self._apart(functools.partial(self.script, body))
            else:
                self.bodies.append(body)
        return Outcome.RAN

    def _program(self, name: str, words: list[str]) -> None:
        """Notes a program; a text with options among its words is a script for another shell, as after `bash -c`."""
        for word in words:
            inner = word.removeprefix("--wrap=")
            if re.match(r"[^-].*\s--\w", inner, re.DOTALL):
                follow = self.script if name in _SHELLS else self.perhaps_script
                self._apart(functools.partial(follow, inner))
        self.commands.append(words)

    def _function(self, name: str, words: list[str]) -> Outcome:
        source, body = self.functions[name]
        arguments, self.arguments = self.arguments, tuple(words[1:])
        self.own.append({})
        with self._within(source):
            found = self.run(body)
        self._restore(self.own.pop())
        self.arguments = arguments
        return found

    def _set(self, name: str, words: list[str], given: Sequence[str]) -> Outcome:
        """Follows a command that gives variables what it reads or writes, where that stands in the script.

        Args:
            name: its name.
            words: its words.
            given: its here-documents and here-strings.
        """
        if name == "getopts":
            # A script that is read has no arguments of its own.
            return Outcome.FAILS
        options = [at for at, word in enumerate(words[:-1]) if _SET_OPTION.fullmatch(word)]
        arrays = [plain(words[at + 1]) for at in options if words[at][-1] in "av"]
        names = [plain(w) for at, w in enumerate(words[1:]) if at not in options and not w.startswith("-")]
        line = None
        if name == "read" and len(given) == 1 and not arrays:
            line = given[0] if "-d" in words else given[0].partition("\n")[0]
        for variable in arrays or names:
            self.values[variable] = unknown("what is read where the script runs")
        if line is not None:
            blanks = plain(elements(self.values.get("IFS", " \t\n"))[0])
            parts = re.split(f"[{re.escape(blanks)}]+", line.strip(blanks)) if blanks else [line]
            last = line.strip(blanks)
            for at, variable in enumerate(names):
                self.values[variable] = last if at == len(names) - 1 else "".join(parts[at : at + 1])
                last = last.removeprefix("".join(parts[at : at + 1])).lstrip(blanks)
        return Outcome.RAN


def _merged(one: dict[str, Value], other: dict[str, Value]) -> dict[str, Value]:
    """What is known after one of two ways was taken."""
    found: dict[str, Value] = {}
    for name in {**one, **other}:
        first, second = one.get(name, ""), other.get(name, "")
        if first == second:
            found[name] = first
        elif isinstance(first, tuple) or isinstance(second, tuple) or " --" in f" {first} {second}":
            texts = [elements(value) if isinstance(value, tuple) else tuple(value.split()) for value in (first, second)]
            same = next((n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
            words = (*texts[0][:same], *(MAYBE + word for text in texts for word in text[same:]))
            is_array = isinstance(first, tuple) or isinstance(second, tuple)
            found[name] = words if is_array else " ".join(words)
        else:
            found[name] = UNDECIDED
    return found
