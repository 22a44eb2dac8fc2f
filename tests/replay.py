"""Programs of a launch after the first, in Triton's interpreter: the same operations on other values.

Triton's rules, in Python, take most of the time of a program, and find the same at each.  So the first program's
operations are recorded, and the next programs repeat them.  Where a program decides by a value that it computed, such
as the end of a loop, the record branches.  A program that decides otherwise than all before it is run from its
beginning, but what it has computed already is not computed again.

What depends on no program, and reads no memory, is computed once a launch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

# Reads or writes memory, or is seen from outside: never computed once for all programs.
WITH_EFFECTS = ("load", "store", "atomic", "print", "assert", "assume", "gather", "scatter", "program_id")


@dataclass(slots=True)
class Step:
    """function(*values[inputs]) gives the values at `outputs`.  types: of its results, where they are tensors."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...] | int | None = None
    types: Any = None


@dataclass(slots=True)
class Stretch:
    """Steps up to a decision by the value at `place`, and what follows each of its outcomes."""

    steps: list[Step] = field(default_factory=list)
    place: int | None = None
    read: Callable[[Any], Any] | None = None
    following: dict[Any, "Stretch"] = field(default_factory=dict)


class Launch:
    """The programs of one launch.

    values: handles and other arguments of operations, by place; a program writes the places of its own values.  shared:
    the places of all others, by id.  repeats: False once something happened that is not recorded.
    """

    def __init__(self, recorder: "Recorder", program: Callable[..., None]):
        self.recorder, self.program = recorder, program
        self.values: list[Any] = []
        self.shared: dict[int, int] = {}
        self.first: Stretch | None = None
        self.repeats = True

    def run(self, **arguments: Any) -> None:
        """The next program."""
        if not self.repeats:
            self.program(**arguments)
            return
        path = self._repeated()
        if path is not None:
            with self.recorder.recording(self, path):
                self.program(**arguments)

    def place_of(self, value: Any) -> int:
        """Of a value that all programs share."""
        place = self.shared.get(id(value))
        if place is None:
            place = self.shared[id(value)] = len(self.values)
            self.values.append(value)
        return place

    def _repeated(self) -> list[Stretch] | None:
        """Repeat what is recorded.  None: to the end; else the stretches before a decision that is new."""
        if self.first is None:
            self.first = Stretch()
            return []
        values, stretch, path = self.values, self.first, []
        while True:
            path.append(stretch)
            for step in stretch.steps:
                result = step.function(*[values[place] for place in step.inputs])
                outputs = step.outputs
                if type(outputs) is int:
                    values[outputs] = result
                elif outputs:
                    for place, value in zip(outputs, result, strict=True):
                        values[place] = value
            if stretch.place is None:
                return None
            following = stretch.following.get(stretch.read(values[stretch.place]))
            if following is None:
                return path
            stretch = following


class Recorder:
    """Sees every operation of the interpreter, for one launch at a time.

    is_recording: a program is recorded, and no operation runs, which may call others.
    """

    def __init__(self, builder: Any, handle: type):
        self.builder, self.handle = builder, handle
        self.launch: Launch | None = None
        self.is_recording = False
        self.operations = {name: self._seen(name) for name in filter(makes_handles, dir(builder))}

    def _seen(self, name: str) -> Callable[..., Any]:
        has_effects = any(part in name for part in WITH_EFFECTS)
        kind, builder = type(self.builder), self.builder

        def operation(*args: Any, **kwargs: Any) -> Any:
            function = getattr(kind, name)
            if not self.is_recording:
                return function(builder, *args, **kwargs)
            if kwargs:
                function, args = named(function, len(args), tuple(kwargs)), (*args, *kwargs.values())
            # Of one program alone its number is no value of its own.
            alone = name == "create_get_program_id" and builder.grid_dim[args[0]] == 1
            return self.step(name, function, (builder, *args), has_effects and not alone)[0]

        return operation

    def recording(self, launch: Launch, path: list[Stretch]) -> "Recorder":
        """A context.  path: what the program has computed already."""
        self.launch, self.is_recording = launch, True
        self.at = path[-1] if path else launch.first
        self.done: Iterator[Step] = chain.from_iterable(stretch.steps for stretch in path)
        # Values of this program, by the ids of their handles.
        self.own: dict[int, int] = {}
        self.next: Step | None = next(self.done, None)
        self.ahead = iter([stretch.place for stretch in path[:-1]])
        return self

    def __enter__(self) -> None:
        self.builder.__dict__.update(self.operations)

    def __exit__(self, *_: object) -> None:
        for name in self.operations:
            del self.builder.__dict__[name]
        self.launch, self.is_recording = None, False

    def give_up(self) -> None:
        """Something happened that is not recorded: the launch's programs are run one by one."""
        self.launch.repeats = False
        self.launch, self.is_recording = None, False

    def step(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], has_effects: bool) -> Any:
        """(the operation's result, its step; None: it is computed once a launch, or not recorded)"""
        place_of_own, is_own, places = self.own.get, has_effects, []
        for value in args:
            place = place_of_own(id(value))
            places.append(place)
            if place is not None:
                is_own = True
            elif type(value) in (list, tuple) and any(type(item) is self.handle for item in value):
                self.give_up()
                return function(*args), None
        if not is_own:
            return self.unseen(function, *args), None
        if self.next is not None:
            step = self.next
            assert step.name == name, (step.name, name)
            self.next = next(self.done, None)
            return self._known(step), step
        for at, place in enumerate(places):
            if place is None:
                places[at] = self.launch.place_of(args[at])
        result = self.unseen(function, *args)
        step = Step(name, function, tuple(places))
        if type(result) is self.handle:
            step.outputs = self._placed(result)
        elif type(result) is tuple:
            step.outputs = tuple(map(self._placed, result))
        elif result is not None:
            self.give_up()
            return result, None
        self.at.steps.append(step)
        return result, step

    def unseen(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(*args), whose operations are not recorded."""
        before, self.is_recording = self.is_recording, False
        try:
            return function(*args)
        finally:
            self.is_recording = before

    def _placed(self, value: Any) -> int:
        place = self.own.get(id(value))
        if place is None:
            place = self.own[id(value)] = len(self.launch.values)
            self.launch.values.append(value)
        return place

    def _known(self, step: Step) -> Any:
        values = self.launch.values
        one = type(step.outputs) is int
        places = (step.outputs,) if one else step.outputs or ()
        for place in places:
            self.own[id(values[place])] = place
        if not places:
            return None
        return values[places[0]] if one else tuple(values[place] for place in places)

    def decided(self, handle: Any, read: Callable[[Any], Any]) -> Any:
        """The value by which the program goes on."""
        value = read(handle)
        if not self.is_recording or id(handle) not in self.own:
            return value
        place = self.own[id(handle)]
        if (expected := next(self.ahead, None)) is not None:
            assert expected == place
            return value
        assert self.next is None and self.at.place in (None, place)
        self.at.place, self.at.read = place, read
        self.at.following[value] = self.at = Stretch()
        return value


def named(function: Callable[..., Any], count: int, names: tuple[str, ...]) -> Callable[..., Any]:
    """The function of an object, `count` arguments and those of these names, without their names."""
    return lambda *args: function(*args[: 1 + count], **dict(zip(names, args[1 + count :], strict=True)))


def makes_handles(name: str) -> bool:
    """Whether a method of the interpreter's builder with this name is an operation."""
    is_constant = name.startswith(("get_int", "get_uint", "get_fp")) and not name.endswith("_ty")
    return is_constant or name.startswith("create_") or name in ("get_null_value", "get_all_ones_value")
