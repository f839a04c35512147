"""Scripts of the shell as trees of commands, so that they can be read without being run.

Words are kept as they are written, with their quotes; `automap.export.shell` says what they stand for. Read are lists,
pipes, groups, functions, if, case, the loops, tests, arithmetic, arrays and here-documents. Redirections are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeAlias

from automap.errors import PlanError
from automap.export.stated import refuse

MAX_DEPTH = 40
"""Levels of commands, quotes and substitutions inside one another that are read: more than scripts have (assumed)."""
TESTS = {"[", "[[", "test", "true", "false", ":"}
"""Commands that only decide something."""
_LEAVES = {"exit", "return"}
ASSIGNED = re.compile(r"(\w+)(?:\[[^]]*\])?\+?=")
"""The start of an assignment."""
_CLOSERS = {"(": ")", "{": "}"}
_PLAIN = re.compile(r"[^\s\\'\"`$;&|<>()]+")
_OPERATORS = (";;&", ";;", ";&", "&&", "||", "|&", ";", "|", "&", "(", ")", "\n")
_REDIRECTION = re.compile(r"(?:&>>?|>&|<&|<>|>\||>>|<<<|>|<)[ \t]*")
_HEREDOC = re.compile(r"<<(-?)[ \t]*(\"[^\"\n]*\"|'[^'\n]*'|[^\s;&|<>()]+)")


@dataclass(frozen=True, slots=True)
class Command:
    """A simple command."""

    words: tuple[str, ...]
    bodies: tuple[str, ...] = ()
    """Its here-documents."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`((…))` as a command."""

    text: str


@dataclass(frozen=True, slots=True)
class Chain:
    """Commands behind one another: each with what stands before it, `&&`, `||`, `|`, or nothing, or `!`."""

    parts: tuple[tuple[str, Node], ...]


@dataclass(frozen=True, slots=True)
class If:
    """Conditions, each with what is done where it holds."""

    branches: tuple[tuple[Block, Block], ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A word and what is done for each list of patterns."""

    word: str
    branches: tuple[tuple[tuple[str, ...], Block], ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop over words, or while a condition holds (`until` is a while that is turned)."""

    name: str
    words: tuple[str, ...]
    condition: Block | None
    body: Block


@dataclass(frozen=True, slots=True)
class Function:
    """The definition of a function."""

    name: str
    body: Block


Node: TypeAlias = "Command | Arithmetic | Chain | If | Case | Loop | Function | Block"


@dataclass(frozen=True, slots=True)
class Block:
    """Commands one after another."""

    nodes: tuple[Node, ...]


@dataclass(slots=True)
class _Token:
    kind: str
    """`word`, `operator`, `arithmetic` or `body`, of a here-document."""
    text: str


def parse(text: str) -> Block:
    """The commands of a script.

    Raises:
        PlanError: it is no script.
    """
    parser = _Parser(_tokens(text))
    block = parser.block(())
    if parser.now is not None:
        raise broken(parser.now.text.strip() or "a line", "stands where no command begins")
    return block


def leaves(node: Node) -> bool:
    """Whether a way ends the script or the function."""
    if isinstance(node, Block):
        return any(map(leaves, node.nodes))
    return isinstance(node, Command) and node.words[:1] != () and node.words[0] in _LEAVES


def is_test_command(node: Node) -> bool:
    """Whether a command only decides something."""
    if isinstance(node, Command):
        return node.words[:1] != () and node.words[0] in TESTS
    return isinstance(node, Arithmetic)


def words_of(text: str) -> list[str]:
    """The words between the parentheses of an array."""
    return [token.text for token in _tokens(text) if token.kind == "word"]


def broken(value: str, what: str) -> PlanError:
    """The error for a script that the shell would not read."""
    repair = "Close every quote, parenthesis and block, or give a script of bash."
    return refuse("script", value[:60], what, repair)


def closing(text: str, start: int, depth: int = 0) -> int:
    """The place behind a quote, a substitution or parentheses that begin at `start`."""
    if depth > MAX_DEPTH:
        raise broken(text[start : start + 20], "is nested too deeply")
    opener = text[start]
    if opener == "$":
        return closing(text, start + 1, depth + 1) if text[start + 1 : start + 2] in ("(", "{", "'") else start + 1
    if opener in "'`":
        end = text.find(opener, start + 1)
        if end < 0:
            raise broken(text[start : start + 20], "is no shell script: a quote is open")
        return end + 1
    end, closer = start + 1, _CLOSERS.get(opener, opener)
    while end < len(text):
        letter = text[end]
        if letter == closer:
            return end + 1
        is_comment = letter == "#" and closer == ")" and text[end - 1] in " \t\n("
        if is_comment:
            line = text.find("\n", end)
            end = len(text) if line < 0 else line
        elif letter == "\\":
            end += 2
        elif letter in "`$" or (letter in "\"'" and closer != '"') or (letter == "(" and closer == ")"):
            end = closing(text, end, depth + 1)
        else:
            end += 1
    raise broken(text[start : start + 20], "is no shell script: a quote or a parenthesis is open")


def _word(text: str, start: int) -> int:
    """The place behind the word that begins at `start`."""
    end = start
    while end < len(text):
        letter = text[end]
        if plain := _PLAIN.match(text, end):
            end = plain.end()
        elif letter == "\\":
            end += 2
        elif letter in "'\"`$" or (letter == "(" and ASSIGNED.fullmatch(text, start, end)):
            end = closing(text, end)
        else:
            break
    return min(end, len(text))


# long: one branch a kind of token
def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    waiting: list[tuple[str, bool, _Token]] = []
    place = 0
    while place < len(text):
        letter = text[place]
        if text.startswith("\\\n", place) or letter in " \t\r":
            place += 2 if letter == "\\" else 1
        elif letter == "#":
            line = text.find("\n", place)
            place = len(text) if line < 0 else line
        elif text.startswith("((", place) and text[(end := closing(text, place)) - 2 : end] == "))":
            found.append(_Token("arithmetic", text[place + 2 : end - 2]))
            place = end
        elif text.startswith(("<(", ">("), place):
            end = closing(text, place + 1)
            found.append(_Token("word", f"$({text[place + 2 : end - 1]})"))
            place = end
        elif text[place : place + 3] != "<<<" and (here := _HEREDOC.match(text, place)):
            body = _Token("body", "")
            waiting.append((here[2].strip("\"'\\"), bool(here[1]), body))
            found.append(body)
            place = here.end()
        elif redirection := _REDIRECTION.match(text, place):
            place = redirection.end()
            # A placeholder such as <path> is no redirection to an option.
            place = place if text.startswith("--", place) else _word(text, place)
        elif operator := next((one for one in _OPERATORS if text.startswith(one, place)), None):
            found.append(_Token("operator", operator))
            place += len(operator)
            if operator == "\n":
                for name, is_indented, body in waiting:
                    body.text, place = _body(text, place, name, is_indented)
                waiting.clear()
        else:
            end = _word(text, place)
            is_stream = text[place:end].isdigit() and text[end : end + 1] in ("<", ">")
            if not is_stream:
                found.append(_Token("word", text[place:end]))
            place = end
    return found


def _body(text: str, start: int, name: str, is_indented: bool) -> tuple[str, int]:
    """The here-document that begins at a line, and the place behind it."""
    lines: list[str] = []
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        line = text[start:end].lstrip("\t") if is_indented else text[start:end]
        start = end + 1
        if line == name:
            break
        lines.append(line)
    return "\n".join(lines), min(start, len(text))


@dataclass(slots=True)
class _Parser:
    """What is left of the tokens of a script."""

    tokens: list[_Token]
    place: int = 0
    depth: int = 0
    compound: dict[str, Callable[[], Node]] = field(init=False)

    def __post_init__(self) -> None:
        self.compound = {
            "if": self._if,
            "case": self._case,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "function": self._function,
            "{": lambda: self._between("{", "}"),
        }

    @property
    def now(self) -> _Token | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def is_now(self, *texts: str) -> bool:
        """Whether one of these words or operators is next."""
        now = self.now
        return now is not None and now.kind in ("word", "operator") and now.text in texts

    def take(self) -> str:
        """The next token's text."""
        now = self.now
        if now is None:
            raise broken("the end", "of the script comes too early")
        self.place += 1
        return now.text

    def need(self, *texts: str) -> str:
        """The next token's text, which must be one of these."""
        if not self.is_now(*texts):
            value = "the end" if self.now is None else self.now.text.strip() or "a line's end"
            raise broken(value, f"stands where {' or '.join(texts)} is needed")
        return self.take()

    def skip(self, *texts: str) -> None:
        """Goes behind all of these."""
        while self.is_now(*texts):
            self.place += 1

    def block(self, ends: Collection[str]) -> Block:
        """Commands up to one of these words."""
        if self.depth > MAX_DEPTH:
            raise broken(self.now.text if self.now else "", "is nested too deeply")
        self.depth += 1
        nodes: list[Node] = []
        self.skip("\n", ";", "&")
        while self.now is not None and not self.is_now(*ends, ")", ";;", ";&", ";;&"):
            nodes.append(self._chain())
            self.skip("\n", ";", "&")
        self.depth -= 1
        return Block(tuple(nodes))

    def _chain(self) -> Node:
        parts: list[tuple[str, Node]] = []
        join = ""
        while True:
            while self.is_now("!", "time"):
                join = f"{join} !".strip() if self.take() == "!" else join
            parts.append((join, self._one()))
            if not self.is_now("&&", "||", "|", "|&"):
                break
            join = self.take()[:2].replace("|&", "|")
            self.skip("\n")
        return parts[0][1] if len(parts) == 1 and not parts[0][0] else Chain(tuple(parts))

    def _one(self) -> Node:
        now = self.now
        if now is not None and now.kind == "arithmetic":
            return Arithmetic(self.take())
        if self.is_now("("):
            node: Node = self._between("(", ")")
        elif now is not None and now.kind == "word" and now.text in self.compound:
            node = self.compound[now.text]()
        else:
            return self._simple()
        # Here-documents of compound commands are their input.
        while self.now is not None and self.now.kind == "body":
            self.place += 1
        return node

    def _simple(self) -> Node:
        words: list[str] = []
        bodies: list[_Token] = []
        is_test = self.is_now("[[")
        while (now := self.now) is not None:
            if now.kind == "operator" and not (is_test and words[-1:] != ["]]"]):
                break
            self.place += 1
            if now.kind == "body":
                bodies.append(now)
            else:
                words.append(f"(({now.text}))" if now.kind == "arithmetic" else now.text)
        if len(words) == 1 and self.is_now("(") and self.tokens[self.place + 1 : self.place + 2]:
            self.take()
            self.need(")")
            self.skip("\n")
            return Function(words[0], self._body())
        if not words and not bodies:
            raise broken(self.now.text.strip() if self.now else "the end", "stands where no command begins")
        return Command(tuple(words), tuple(body.text for body in bodies))

    def _body(self) -> Block:
        node = self._one()
        return node if isinstance(node, Block) else Block((node,))

    def _function(self) -> Node:
        self.take()
        name = self.take()
        self.skip("(", ")", "\n")
        return Function(name, self._body())

    def _between(self, opener: str, closer: str) -> Block:
        self.need(opener)
        block = self.block((closer,))
        self.need(closer)
        return block

    def _if(self) -> Node:
        branches: list[tuple[Block, Block]] = []
        word = self.take()
        while word != "fi":
            condition = Block((Command(("true",)),))
            if word != "else":
                condition = self.block(("then",))
                self.need("then")
            branches.append((condition, self.block(("elif", "else", "fi"))))
            word = self.need("elif", "else", "fi")
        return If(tuple(branches))

    def _case(self) -> Node:
        self.take()
        word = self.take()
        self.skip("\n")
        self.need("in")
        self.skip("\n", ";")
        branches: list[tuple[tuple[str, ...], Block]] = []
        while not self.is_now("esac"):
            self.skip("(")
            patterns = [self.take()]
            while self.is_now("|"):
                self.take()
                patterns.append(self.take())
            self.need(")")
            branches.append((tuple(patterns), self.block(("esac",))))
            self.skip(";;", ";&", ";;&", "\n")
        self.take()
        return Case(word, tuple(branches))

    def _for(self) -> Node:
        self.take()
        now = self.now
        name, words = self.take(), []
        if now is not None and now.kind == "arithmetic":
            name = (ASSIGNED.match(name.strip()) or ["", ""])[1]
            words = ["$(for)"]
        elif self.is_now("in"):
            self.take()
            while not self.is_now(";", "\n", "&"):
                words.append(self.take())
        else:
            words = ["$@"]
        return Loop(name, tuple(words), None, self._done())

    def _while(self) -> Node:
        is_until = self.take() == "until"
        condition = self.block(("do",))
        if is_until:
            condition = Block((Chain((("!", condition),)),))
        return Loop("", (), condition, self._done())

    def _done(self) -> Block:
        self.skip(";", "\n")
        self.need("do")
        block = self.block(("done",))
        self.need("done")
        return block
