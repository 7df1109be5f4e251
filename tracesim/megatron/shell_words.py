"""Words and operators of a shell script, with the places where variables are put in.

Quoting, comments, continued lines, here-documents and arrays are those of bash. Nothing is run here; ``shell`` walks
the tokens. Source: the GNU Bash manual, section 3.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "variable", "command", "arithmetic"]
_OPERATOR = re.compile(r"<<<|<<-|<<|&>>|;;&|&>|>&|<&|>>|>\||<>|\|&|&&|\|\||;;|[;&|()<>\n]")
_NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\Z")
_MOST_DEPTH = 40


class ShellSyntaxError(ValueError):
    """A script that cannot be read as shell."""


@dataclass(frozen=True)
class Piece:
    """A part of a word: text as it stands, or what is put in its place."""

    kind: Kind
    text: str
    quoted: bool


@dataclass(frozen=True)
class Word:
    """A word; ``items`` are those of an array where it assigns one (``NAME=(...)``)."""

    pieces: tuple[Piece, ...]
    items: tuple[Word, ...] | None = None

    @property
    def literal(self) -> str:
        """Its text where it is plain and not quoted, such as a keyword's; else ''."""
        plain = all(piece.kind == "text" and not piece.quoted for piece in self.pieces)
        return "".join(piece.text for piece in self.pieces) if plain and self.items is None else ""


@dataclass(frozen=True)
class Operator:
    """What separates words: ``;``, ``&&``, a parenthesis, the end of a line."""

    text: str


Token = Word | Operator


def shell_tokens(text: str) -> list[Token]:
    """The tokens of a script.

    Raises:
        ShellSyntaxError: if brackets or quotes inside an expansion do not close, or nest too deep.
    """
    return _Lexer(text.replace("\r\n", "\n")).tokens()


def quoted_pieces(text: str) -> tuple[Piece, ...]:
    """The pieces of text that stands between double quotes."""
    lexer = _Lexer(text)
    lexer.quotes(len(text))
    return tuple(lexer.pieces)


def plain_pieces(text: str) -> tuple[Piece, ...]:
    """The pieces of text as one word, blanks included."""
    lexer = _Lexer(text)
    while lexer.at < len(text):
        lexer.one_piece()
    return tuple(lexer.pieces)


class _Lexer:
    def __init__(self, text: str, depth: int = 0) -> None:
        if depth > _MOST_DEPTH:
            raise ShellSyntaxError("nests too deep")
        self.text, self.at, self.depth = text, 0, depth
        self.pieces: list[Piece] = []
        self.documents: list[str] = []

    def tokens(self, closing: str = "") -> list[Token]:
        """Tokens up to the end, or to the operator ``closing``, which is taken too."""
        found: list[Token] = []
        while True:
            self._skip_blanks()
            if self.at >= len(self.text):
                return found
            operator = _OPERATOR.match(self.text, self.at)
            if operator is None:
                word = self._word()
                if word is not None:
                    found.append(word)
                continue
            self.at = operator.end()
            if operator.group() == closing:
                return found
            if operator.group() in ("<<", "<<-"):
                self._skip_blanks()
                self.documents.append(_unquoted(self._word()))
                continue
            found.append(Operator(operator.group()))
            if operator.group() == "\n":
                self._skip_documents()

    def _skip_blanks(self) -> None:
        while self.at < len(self.text):
            if self.text[self.at] in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def _skip_documents(self) -> None:
        for ending in self.documents:
            found = re.compile(rf"^\t*{re.escape(ending)}[ \t]*$", re.MULTILINE).search(self.text, self.at)
            self.at = found.end() if found else len(self.text)
        self.documents = []

    def _word(self) -> Word | None:
        """The word here; None for a number in front of a redirection."""
        self.pieces = []
        while self.at < len(self.text) and self.text[self.at] not in " \t\n;&|<>)":
            if self.text[self.at] == "(":
                head = "".join(piece.text for piece in self.pieces)
                if not _ARRAY.fullmatch(head):
                    break
                inner = _Lexer(self.text, self.depth + 1)
                inner.at = self.at + 1
                pieces = tuple(self.pieces)
                items = [token for token in inner.tokens(")") if isinstance(token, Word)]
                self.at = inner.at
                return Word(pieces, tuple(items))
            self.one_piece()
        word = Word(tuple(self.pieces))
        if word.literal.isdecimal() and self.text[self.at : self.at + 1] in ("<", ">"):
            return None
        return word

    def one_piece(self) -> None:
        """Take what is here: a quoted stretch, an expansion, or text up to the next of these."""
        text, at = self.text, self.at
        char = text[at]
        if char == "\\":
            if text[at + 1 : at + 2] != "\n":
                self._add("text", text[at + 1 : at + 2], quoted=True)
            self.at += 2
        elif char in "'\"" or text.startswith("$'", at):
            self._quoted(at + (char == "$"))
        elif char in "$`":
            self._expansion(quoted=False)
        else:
            found = re.compile(r"[^\\'\"$`\s;&|()<>]+|[\s;&|()<>]").match(text, at)
            assert found is not None, "any character is one or the other"
            self._add("text", found.group(), quoted=False)
            self.at = found.end()

    def _quoted(self, at: int) -> None:
        mark = self.text[at]
        end = self.text.find("'", at + 1) if mark == "'" else self._closing_quote(at + 1)
        if end < 0:
            # An apostrophe in plain text closes nowhere.
            self._add("text", mark, quoted=True)
            self.at = at + 1
        elif mark == "'":
            self._add("text", self.text[at + 1 : end], quoted=True)
            self.at = end + 1
        else:
            self.at = at + 1
            self._add("text", "", quoted=True)
            self.quotes(end)
            self.at = end + 1

    def quotes(self, end: int) -> None:
        """Take what stands between double quotes, up to ``end``."""
        while self.at < end:
            if self.text[self.at] == "\\" and self.text[self.at + 1 : self.at + 2] in (
                "$",
                "`",
                '"',
                "\\",
                "\n",
            ):
                follower = self.text[self.at + 1]
                self._add("text", "" if follower == "\n" else follower, quoted=True)
                self.at += 2
            elif self.text[self.at] in "$`":
                self._expansion(quoted=True)
            else:
                found = re.compile(r"[^\\$`]+|\\").match(self.text, self.at, end)
                assert found is not None, "any character is one or the other"
                self._add("text", found.group(), quoted=True)
                self.at = found.end()

    def _closing_quote(self, at: int) -> int:
        while at < len(self.text):
            char = self.text[at]
            if char == '"':
                return at
            if char == "\\":
                at += 2
            elif self.text.startswith(("$(", "${"), at):
                at = self._closing_bracket(at + 1) + 1
            else:
                at += 1
        return -1

    def _expansion(self, *, quoted: bool) -> None:
        text, at = self.text, self.at
        if text[at] == "`":
            end = text.find("`", at + 1)
            end = len(text) if end < 0 else end
            self._add("command", text[at + 1 : end], quoted=quoted)
            self.at = end + 1
        elif text.startswith("$((", at):
            end = self._closing_bracket(at + 1)
            self._add("arithmetic", text[at + 3 : end - 1], quoted=quoted)
            self.at = end + 1
        elif text.startswith(("$(", "${"), at):
            end = self._closing_bracket(at + 1)
            kind: Kind = "command" if text[at + 1] == "(" else "variable"
            self._add(kind, text[at + 2 : end], quoted=quoted)
            self.at = end + 1
        else:
            name = _NAME.match(text, at + 1)
            if name is None:
                self._add("text", "$", quoted=True)
                self.at += 1
            else:
                self._add("variable", name.group(), quoted=quoted)
                self.at = name.end()

    def _closing_bracket(self, at: int) -> int:
        """Where the bracket at ``at`` closes."""
        opening, closing = self.text[at], {"(": ")", "{": "}"}[self.text[at]]
        depth, start = 0, at
        while at < len(self.text):
            char = self.text[at]
            if char == "\\":
                at += 1
            elif char == "'" and opening == "(":
                end = self.text.find("'", at + 1)
                at = at if end < 0 else end
            elif char == opening:
                depth += 1
            elif char == closing:
                depth -= 1
                if not depth:
                    return at
            at += 1
        raise ShellSyntaxError(f"{self.text[start - 1 : start + 30]!r} does not close")

    def _add(self, kind: Kind, text: str, *, quoted: bool) -> None:
        self.pieces.append(Piece(kind, text, quoted))


def _unquoted(word: Word | None) -> str:
    return "".join(piece.text for piece in word.pieces) if word is not None else ""
