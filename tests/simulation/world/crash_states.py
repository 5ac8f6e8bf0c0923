"""Every state in which a loss of power may leave a simulated disk.

There are far too many to make one after the other: each change that was not synced may have reached the disk, or not.
So nothing is decided before somebody looks at it. Whoever looks at the disk afterwards asks *questions*: is there such
a name, what does this file hold. Each is answered in every way that is possible, one run for each. States that get the
same questions and answers cannot be told apart: one of them is looked at.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

from tests.simulation.world.disk import Disk, File, Folder, Node, contents

Choose = Callable[[int], int]
"""Given how many answers there are, the number of one of them."""

_NAMED_ANEW = 10**6
"""Temporary names after the loss of power are told from those before by their numbers."""


class Question(NamedTuple):
    """Of what ``path`` was when the power came back: is there a ``name`` in it ("name"), which "names" are in it, what
    are its "data" and its "time"."""

    about: str
    path: str
    name: str = ""


class Remains:
    """One state that a loss of power leaves of ``disk``, decided by ``choose`` as questions are asked.

    ``disk`` itself is not changed, and must not be until all questions are asked. In the folders ``together`` all names
    that were not synced last, or none.
    """

    def __init__(self, disk: Disk, choose: Choose, together: Collection[str] = ()) -> None:
        self.history: list[tuple[Question, Any]] = []
        """All questions so far, with their answers."""
        self._choose, self._pending, self._together = choose, disk.pending, together
        self._chosen_together: int | None = None
        self._lasting: dict[int, bool] = {}
        self._touching = defaultdict[tuple[Folder, str], list[int]](list)
        for number, change in enumerate(disk.pending):
            for touched in change.touches:
                self._touching[touched].append(number)
        self._left: dict[Node, Node] = {}
        self._at: dict[str, Any] = {}
        self._root = self._remaining(disk.root, "")

    def disk(self, clock: Callable[[], float]) -> Disk:
        """What is left, for programs to work on. All of it lasts."""
        left = Disk(clock)
        assert isinstance(self._root, Folder)
        left.root, left.asides = self._root, _NAMED_ANEW
        return left

    def answer(self, question: Question) -> Any:
        """Ask a question that was not asked yet."""
        node = self._at[question.path]
        if question.about == "name":
            node.names.get(question.name)
        elif question.about == "names":
            len(node.names)
        else:
            getattr(node, question.about)
        asked, answer = self.history[-1]
        assert asked == question
        return answer

    def find(self, folder: Folder, path: str, name: str) -> Node | None:
        """What a name in a folder of the disk before leads to now."""
        node = folder.synced.get(name)
        choose = self._choose_together if path in self._together else self._choose
        for number in self._touching.get((folder, name), ()):
            if not self._lasts(number, choose):
                break
            edits = self._pending[number].edits
            node = next(edit.node for edit in edits if edit.folder is folder and edit.name == name)
        return None if node is None else self._remaining(node, f"{path}/{name}".lstrip("/"))

    def names_of(self, folder: Folder) -> set[str]:
        """Those that may be there."""
        return {*folder.synced, *(name for touched, name in self._touching if touched is folder)}

    def look(self, file: File, path: str, about: str) -> Any:
        """The "data" or the "time" of a file of the disk before."""
        if about == "time":
            times = [file.time, *([file.synced_time] if file.synced_time != file.time else [])]
            time = times[self._choose(len(times))]
            self.history.append((Question("time", path), time))
            return time
        options = list(dict.fromkeys(contents(file)))
        data = options[self._choose(len(options))] if file.data != file.synced else file.synced
        self.history.append((Question("data", path), blake2b(data, digest_size=16).digest()))
        return bytearray(data)

    def _choose_together(self, count: int) -> int:
        if self._chosen_together is None:
            self._chosen_together = self._choose(2)
        return self._chosen_together

    def _lasts(self, number: int, choose: Choose) -> bool:
        """Whether a change does, which those of the same names before it must do too."""
        if number not in self._lasting:
            touches = self._pending[number].touches
            earlier = {other for touched in touches for other in self._touching[touched] if other < number}
            self._lasting[number] = all(self._lasts(other, choose) for other in sorted(earlier)) and choose(2) == 0
        return self._lasting[number]

    def _remaining(self, node: Node, path: str) -> Node:
        if node not in self._left:
            kind = _UndecidedFolder if isinstance(node, Folder) else _UndecidedFile
            self._left[node] = self._at[path] = kind(self, node, path)  # type: ignore[arg-type]
        return self._left[node]


class _UndecidedFile(File):
    """What it holds is decided when somebody looks."""

    def __init__(self, remains: Remains, file: File, path: str) -> None:
        self._look = partial(remains.look, file, path)
        self.drops_pages = False

    def __getattr__(self, name: str) -> Any:  # called for what was not set yet
        if name not in ("data", "time"):
            raise AttributeError(name)
        value = self._look(name)
        setattr(self, name, value)
        return value


class _UndecidedFolder(Folder):
    def __init__(self, remains: Remains, folder: Folder, path: str) -> None:
        super().__init__()
        self._undecided = _UndecidedNames(remains, folder, path)
        self.names = self._undecided

    def names_to_remove(self) -> list[str]:
        # Whoever removes a directory learns nothing of what was in it: it may as well be nothing.
        self._undecided.all_asked = True
        return super().names_to_remove()


class _UndecidedNames(dict[str, Node]):
    """Which there are is decided when somebody looks; all changes look first."""

    def __init__(self, remains: Remains, folder: Folder, path: str) -> None:
        super().__init__()
        self._remains, self._folder, self._path = remains, folder, path
        self._asked = set[str]()
        self.all_asked = False

    def get(self, name: str, default: Any = None) -> Any:
        self._ask(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self._ask(str(name))
        return super().__contains__(name)

    def __len__(self) -> int:
        self._ask_all()
        return super().__len__()

    def __iter__(self) -> Iterator[str]:
        self._ask_all()
        return super().__iter__()

    def items(self) -> Any:
        self._ask_all()
        return super().items()

    def _ask(self, name: str) -> None:
        if self.all_asked or name in self._asked:
            return
        self._asked.add(name)
        node = self._remains.find(self._folder, self._path, name)
        if node is not None:
            super().__setitem__(name, node)
        self._remains.history.append((Question("name", self._path, name), _kind(node)))

    def _ask_all(self) -> None:
        if self.all_asked:
            return
        self.all_asked, found = True, []
        for name in sorted(self._remains.names_of(self._folder) - self._asked):
            node = self._remains.find(self._folder, self._path, name)
            if node is not None:
                super().__setitem__(name, node)
                found.append((name, _kind(node)))
        self._remains.history.append((Question("names", self._path), tuple(found)))


class Choices:
    """A way through a tree of choices: the first one, and then, with :meth:`advance`, each of the others."""

    def __init__(self) -> None:
        self._way: list[tuple[int, int]] = []
        self._at = 0

    def __call__(self, count: int) -> int:
        if count == 1:
            return 0
        if self._at == len(self._way):
            self._way.append((0, count))
        chosen, _ = self._way[self._at]
        self._at += 1
        return chosen

    def rewind(self) -> None:
        """Go the same way again."""
        self._at = 0

    def advance(self) -> bool:
        """Turn to the next way; False after the last one."""
        self._at = 0
        while self._way:
            chosen, count = self._way.pop()
            if chosen + 1 < count:
                self._way.append((chosen + 1, count))
                return True
        return False


class _Branch:
    """What was asked first, and by the answer, how it went on. No question: nothing was asked any more."""

    def __init__(self, question: Question | None) -> None:
        self.question = question
        self.by_answer: dict[Any, _Branch] = {}


class Seen:
    """The questions and answers of all states that somebody looked at. Who looks must ask the same where the answers
    are the same."""

    def __init__(self) -> None:
        self._first: _Branch | None = None

    def knows(self, remains: Remains) -> bool:
        """Whether it gives the same answers as one of them; asks for those that tell."""
        branch = self._first
        while branch is not None and branch.question is not None:
            branch = branch.by_answer.get(remains.answer(branch.question))
        return branch is not None

    def add(self, history: Collection[tuple[Question, Any]]) -> None:
        questions: Sequence[Question | None] = [*(question for question, _ in history), None]
        if self._first is None:
            self._first = _Branch(questions[0])
        branch = self._first
        for (question, answer), following in zip(history, questions[1:], strict=True):
            assert branch.question == question, f"{question} was asked, {branch.question} the last time"
            branch = branch.by_answer.setdefault(answer, _Branch(following))


def crash_states(disk: Disk, seen: Seen, together: Collection[str] = ()) -> Iterator[Remains | None]:
    """Each state that a loss of power may leave of ``disk``; None for one that gives the same answers as one before.

    In the folders ``together`` all names that were not synced last, or none: for those that nobody looks at but to
    remove them. Look at each before asking for the next: what was not looked at is not told apart.
    """
    choices = Choices()
    while True:
        if seen.knows(Remains(disk, choices, together)):
            yield None
        else:
            choices.rewind()
            remains = Remains(disk, choices, together)
            yield remains
            seen.add(remains.history)
        if not choices.advance():
            return


def _kind(node: Node | None) -> str:
    return "" if node is None else "folder" if isinstance(node, Folder) else "file"
