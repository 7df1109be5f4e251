"""A launch script walked as bash would walk it, up to the commands that it would run, none of which is run.

Assignments, arrays, ``if``, ``case``, tests and arithmetic are followed, so that of several branches the flags of the
one that is taken count, with the values that variables have there. What only a machine knows is not: files do not
exist, commands succeed and print nothing known. Of a loop the first round is taken. Source: the GNU Bash manual, 3.2.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field

from .shell_expansion import Variables, fields_of, text_of
from .shell_tests import holds
from .shell_words import Operator, Piece, ShellSyntaxError, Token, Word, shell_tokens

_REDIRECTIONS = frozenset(("<", ">", ">>", ">|", "<>", "<&", ">&", "&>", "&>>", "<<<"))
_ENDS = frozenset(("\n", ";", "&", "&&", "||", "|", "|&", ")", ";;", ";;&", "("))
_DECLARATIONS = frozenset(("export", "declare", "local", "readonly", "typeset"))
_KEYWORDS = frozenset(("then", "else", "elif", "fi", "do", "done", "esac", "}"))
_MOST_DEPTH, _MOST_COMMANDS = 40, 20_000


@dataclass
class ShellRun:
    """What a script would run."""

    commands: list[list[str]] = field(default_factory=list)
    """Words of each command, in order, variables put in."""
    variables: Variables = field(default_factory=dict)
    """What variables hold at the end."""
    assumed: list[str] = field(default_factory=list)
    """Choices that the script alone does not settle."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of files that the script may source, by name."""
    steps: int = 0
    """Commands gone through, assignments and calls of functions among them."""


def walk_script(text: str, given: Mapping[str, str], files: Mapping[str, str] | None = None) -> ShellRun:
    """The commands of a script.

    Args:
        text: the script.
        given: variables that are set before it begins; ``1`` is its first argument.
        files: texts of files that it may source, by name.

    Raises:
        ShellSyntaxError: if it cannot be read as shell.
    """
    walk = _Walk(shell_tokens(text), ShellRun(variables=dict(given), files=files or {}))
    while walk.at < len(walk.tokens):
        walk.statements(frozenset(), active=True)
        # What closes nothing, in text that is no script, separates.
        walk.at += 1
    return walk.run


def _inner_script(fields: list[str], files: Mapping[str, str]) -> str | None:
    """The script that a command runs in turn: what it evaluates, what a shell is given, or a file beside this one."""
    if fields[0] == "eval":
        return " ".join(fields[1:])
    if fields[0] in ("source", ".") and len(fields) > 1:
        return files.get(fields[1].rpartition("/")[2])
    shells = (at for at, word in enumerate(fields[:-2]) if word.rpartition("/")[2] in ("bash", "sh"))
    return next((fields[at + 2] for at in shells if fields[at + 1] in ("-c", "-lc", "-ec")), None)


@dataclass
class _Walk:
    tokens: list[Token]
    run: ShellRun
    at: int = 0
    depth: int = 0
    functions: dict[str, list[Token]] = field(default_factory=dict)

    # -- tokens ----------------------------------------------------------------------------------------------------

    def _peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _keyword(self) -> str:
        token = self._peek()
        return token.literal if isinstance(token, Word) else ""

    def _operator(self) -> str:
        token = self._peek()
        return token.text if isinstance(token, Operator) else ""

    def _take(self, *keywords: str) -> None:
        """Go behind one of the keywords, if it is here; a script that lacks it goes on all the same."""
        if self._keyword() in keywords or self._operator() in keywords:
            self.at += 1

    def _skip_lines(self) -> None:
        while self._operator() in ("\n", ";", "&"):
            self.at += 1

    # -- statements ------------------------------------------------------------------------------------------------

    def statements(self, stops: frozenset[str], *, active: bool) -> bool | None:
        """Walk statements up to one of the keywords; whether the last one succeeded."""
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            raise ShellSyntaxError("nests too deep")
        status: bool | None = True
        while True:
            self._skip_lines()
            if self._peek() is None or self._operator() in (")", ";;", ";;&") or self._keyword() in stops:
                self.depth -= 1
                return status
            before = self.at
            status = self._and_or(active=active)
            if self.at == before:
                self.at += 1

    def _and_or(self, *, active: bool) -> bool | None:
        status = self._pipeline(active=active)
        while self._operator() in ("&&", "||"):
            joint = self._operator()
            self.at += 1
            self._skip_lines()
            goes_on = status is not False if joint == "&&" else status is False
            right = self._pipeline(active=active and goes_on)
            status = right if goes_on else status
        return status

    def _pipeline(self, *, active: bool) -> bool | None:
        negated = self._keyword() == "!"
        self.at += negated
        status = self._command(active=active)
        while self._operator() in ("|", "|&"):
            self.at += 1
            self._skip_lines()
            self._command(active=active)
            status = None
        return not status if negated and status is not None else status

    def _command(self, *, active: bool) -> bool | None:
        keyword = self._keyword()
        if keyword == "if":
            return self._if(active=active)
        if keyword == "case":
            return self._case(active=active)
        if keyword in ("for", "select"):
            return self._for(active=active)
        if keyword in ("while", "until"):
            return self._block(("do",), ("done",), active=False)
        if keyword == "{":
            self.at += 1
            status = self.statements(frozenset("}"), active=active)
            self._take("}")
            return status
        if keyword == "[[":
            return self._double_bracket(active=active)
        if keyword == "function":
            self.at += 1
            name = self._keyword()
            self.at += 1
            return self._function(name)
        if self._operator() == "(":
            return self._parentheses(active=active)
        return self._simple(active=active)

    def _parentheses(self, *, active: bool) -> bool | None:
        self.at += 1
        if self._operator() == "(":
            # ((arithmetic)): what it assigns is not followed.
            while self._peek() is not None and self._operator() != ")":
                self.at += 1
            self.at += 2
            return None
        status = self.statements(frozenset(), active=active)
        self._take(")")
        return status

    def _block(self, begin: tuple[str, ...], end: tuple[str, ...], *, active: bool) -> bool | None:
        """A condition and a body between keywords, neither of which is gone into."""
        self.at += 1
        self.statements(frozenset(begin), active=False)
        self._take(*begin)
        status = self.statements(frozenset(end), active=active)
        self._take(*end)
        return status

    def _if(self, *, active: bool) -> bool | None:
        taken, status = False, True
        stops = frozenset(("elif", "else", "fi"))
        while self._keyword() in ("if", "elif"):
            self.at += 1
            condition = self.statements(frozenset(("then",)), active=active and not taken)
            self._take("then")
            chosen = active and not taken and bool(condition)
            self.statements(stops, active=chosen)
            taken = taken or chosen
        if self._keyword() == "else":
            self.at += 1
            self.statements(stops, active=active and not taken)
        self._take("fi")
        return status

    def _case(self, *, active: bool) -> bool | None:
        self.at += 1
        token = self._peek()
        value = text_of(token.pieces, self.run.variables) if isinstance(token, Word) and active else ""
        self.at += 1
        self._skip_lines()
        self._take("in")
        taken = False
        while True:
            self._skip_lines()
            if self._peek() is None or self._keyword() == "esac":
                break
            patterns = []
            while self._peek() is not None and self._operator() not in (")", "\n"):
                token = self._peek()
                if isinstance(token, Word):
                    patterns.append(text_of(token.pieces, self.run.variables) if active else "")
                self.at += 1
            self.at += 1
            chosen = active and not taken and any(fnmatch.fnmatchcase(value, text) for text in patterns)
            self.statements(frozenset(("esac",)), active=chosen)
            taken = taken or chosen
            self._take(";;", ";;&")
        self._take("esac")
        return True

    def _for(self, *, active: bool) -> bool | None:
        self.at += 1
        name = self._keyword()
        self.at += bool(name)
        values: list[str] = []
        while self._peek() is not None and self._operator() not in ("\n", ";"):
            token = self._peek()
            if isinstance(token, Word) and token.literal != "in" and active:
                values += fields_of(token, self.run.variables)
            self.at += 1
        self._skip_lines()
        if active and values and name:
            self.run.variables[name] = values[0]
            if len(values) > 1:
                self.run.assumed.append(f"the script loops over {len(values)} values of {name}: {values[0]}")
        self._take("do")
        status = self.statements(frozenset(("done",)), active=active and bool(values))
        self._take("done")
        return status

    def _double_bracket(self, *, active: bool) -> bool | None:
        self.at += 1
        words: list[str] = []
        while self._peek() is not None and self._keyword() != "]]":
            token = self._peek()
            if isinstance(token, Operator):
                words.append(token.text)
            elif isinstance(token, Word) and active:
                words.append(text_of(token.pieces, self.run.variables))
            self.at += 1
        self.at += 1
        return holds([word for word in words if word != "\n"], self.run.variables) if active else None

    def _function(self, name: str) -> bool | None:
        """Keep the body of a function, which runs where it is called."""
        while self._operator() in ("(", ")", "\n"):
            self.at += 1
        start = self.at
        self._command(active=False)
        self.functions[name] = self.tokens[start : self.at]
        return True

    # -- simple commands -------------------------------------------------------------------------------------------

    def _simple(self, *, active: bool) -> bool | None:
        words: list[Word] = []
        while (token := self._peek()) is not None:
            if isinstance(token, Word):
                words.append(token)
            elif token.text in _REDIRECTIONS:
                self.at += 1
            elif token.text in _ENDS:
                break
            self.at += 1
        if self._operator() == "(" and len(words) == 1:
            return self._function(words[0].literal)
        return self._execute(words) if active and words else True

    def _execute(self, words: list[Word]) -> bool | None:
        self.run.steps += 1
        if self.run.steps > _MOST_COMMANDS:
            raise ShellSyntaxError(f"runs more than {_MOST_COMMANDS:,} commands")
        while words and self._assign(words[0]):
            words = words[1:]
        if not words:
            return True
        if words[0].literal in _DECLARATIONS:
            for word in words[1:]:
                self._assign(word)
            return True
        fields = [part for word in words for part in fields_of(word, self.run.variables)]
        if not fields:
            return True
        if fields[0] in ("[", "test"):
            tested = [text_of(word.pieces, self.run.variables) for word in words[1:]]
            return holds(tested[: -1 if fields[0] == "[" else None], self.run.variables)
        if fields[0] == "unset":
            for name in fields[1:]:
                self.run.variables.pop(name, None)
        if fields[0] == "false":
            return False
        if fields[0] in self.functions:
            return self._call(fields)
        inner = _inner_script(fields, self.run.files)
        if inner is not None:
            return self._inside(shell_tokens(inner))
        self.run.commands.append(fields)
        return True

    def _assign(self, word: Word) -> bool:
        """Set the variable that a word assigns; whether it is such a word."""
        head = word.pieces[0].text if word.pieces and word.pieces[0].kind == "text" else ""
        name, equals, rest = head.partition("=")
        adds = name.endswith("+")
        name = name.removesuffix("+")
        index = name.endswith("]")
        name = name.split("[")[0]
        if not equals or word.pieces[0].quoted or not name.isidentifier() or not name.isascii():
            return False
        variables, held = self.run.variables, self.run.variables.get(name)
        if word.items is not None:
            items = [part for item in word.items for part in fields_of(item, variables)]
            before = [held] if isinstance(held, str) and held else list(held or [])
            variables[name] = [*before, *items] if adds else items
            return True
        first = Piece("text", rest, quoted=False)
        value = text_of((first, *word.pieces[1:]), variables)
        if index:
            # Of arrays by key none is followed.
            return True
        variables[name] = f"{held}{value}" if adds and isinstance(held, str) else value
        return True

    def _inside(self, tokens: list[Token]) -> bool | None:
        """Walk what a command runs in turn: a function, a text, another file."""
        inner = _Walk(tokens, self.run, 0, self.depth + 1, self.functions)
        return inner.statements(frozenset(), active=True)

    def _call(self, fields: list[str]) -> bool | None:
        kept = {str(number): self.run.variables.get(str(number)) for number in range(1, 10)}
        self.run.variables.update({str(number): value for number, value in enumerate(fields[1:10], 1)})
        status = self._inside(self.functions[fields[0]])
        for number, value in kept.items():
            if value is None:
                self.run.variables.pop(number, None)
            else:
                self.run.variables[number] = value
        return status
