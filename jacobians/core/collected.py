"""What files declare and other packages announce, collected on the first look-up."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint
from typing import Any, Generic, TypeVar

from bpk.jacobians.core.errors import explain, value_error, warn

T = TypeVar("T")


class Collected(ABC, Generic[T]):
    """Members by what they are looked up by, of which no two members may have the same.

    `load` yields the members that exist beforehand, `announced` those of other packages, with a name for each package:
    one whose members cannot be added is left out, and told. `add` brings in one more.
    """

    what: str
    """What members are called."""
    without: str
    """What becomes of the members of a package that are left out."""
    error: type[ValueError] = ValueError
    """Raised where a member cannot be added."""

    def __init__(
        self,
        load: Callable[[], Iterable[T]],
        announced: Callable[[], Iterable[tuple[str, Iterable[T]]]] = tuple,
    ) -> None:
        self._load = load
        self._announced = announced
        self._loaded = self._loading = False
        self._lock = threading.RLock()
        self._members: list[T] = []
        self._owners: dict[Any, T] = {}

    def __iter__(self) -> Iterator[T]:
        self.fill()
        return iter(tuple(self._members))

    def add(self, member: T) -> None:
        """Register one more; what is taken already is refused."""
        self.fill()
        self._insert(member)

    def remove(self, member: T) -> None:
        """Take one out again."""
        self.fill()
        if member not in self._members:
            raise value_error(
                f"{member!r} is not registered.",
                "what is taken out is the object that was added, not another one like it.",
                "keep what you add (rule = bpk.register(...)), and pass that.",
            )
        self._members.remove(member)
        self._owners = {key: m for key, m in self._owners.items() if m is not member}
        self.changed()

    @abstractmethod
    def keys_of(self, member: T) -> Iterable[Any]:
        """By what a member is looked up.

        Raises:
            ValueError: If it cannot be a member (an `error`).
        """

    @abstractmethod
    def taken(self, key: Any, present: T, member: T) -> str:
        """What to tell where two members have one key."""

    def changed(self) -> None:
        """Called when members have come or gone."""

    def fill(self) -> None:
        """Collect all members, once."""
        if self._loaded:
            return
        with self._lock:  # other threads wait until all members are there
            if self._loaded or self._loading:
                return
            self._loading = True
            try:
                for member in self._load():
                    self._insert(member)
                for package, members in self._announced():
                    self._insert_all(package, members)
                self._loaded = True
            except BaseException:  # not half of them: the next look-up shall raise as well
                self._members, self._owners = [], {}
                raise
            finally:
                self._loading = False

    def _insert_all(self, package: str, members: Iterable[T]) -> None:
        """Add all members of a package, or none of them where one cannot be added."""
        before = list(self._members), dict(self._owners)
        try:
            for member in members:
                self._insert(member)
        except self.error as error:
            self._members, self._owners = before
            self.changed()
            warn(
                explain(
                    f"The {self.what} of {package} are left out: {str(error).splitlines()[0]}",
                    f"a package adds {self.what}, and replaces none; {self.without}.",
                    "mend or uninstall that package.",
                )
            )

    def _insert(self, member: T) -> None:
        keys = dict.fromkeys(self.keys_of(member), member)
        for key in keys:
            if key in self._owners:
                raise self.error(self.taken(key, self._owners[key], member))
        self._members.append(member)
        self._owners.update(keys)
        self.changed()


def announced(entries: Iterable[EntryPoint], what: str, without: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """What entry points of other packages hold, each with what to call the package.

    The user is told of those that cannot be imported.
    """
    for entry in entries:
        package = f"package '{entry.dist.name}'" if entry.dist is not None else "a package"
        called = f"{package}, announced as '{entry.name}' ({entry.value}),"
        try:
            yield called, tuple(entry.load())
        except (Exception, SystemExit) as error:  # whatever that package raises
            warn(
                explain(
                    f"The {what} of {called} cannot be loaded: {error!r}.",
                    f"importing them raised; {without}.",
                    "mend or uninstall that package.",
                )
            )
