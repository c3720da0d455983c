"""Options of commands that are made from the fields of dataclasses."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

F = TypeVar("F", bound=Callable[..., None])


def options_of(
    config: type, panel: str, help: Mapping[str, str] | None = None, repeated: Collection[str] = ()
) -> Iterator[inspect.Parameter]:
    """Yield an option for each field of a dataclass that has a help text; one that is not given is None.

    Args:
        config: The dataclass; ``setting`` gives its fields help texts.
        panel: The heading above the options.
        help: Help texts of fields that have none.
        repeated: Fields that may be given several times, as those of a sweep.

    """
    hints = get_type_hints(config)
    for each in fields(config):
        text = each.metadata.get("help") or (help or {}).get(each.name)
        if text is None:
            continue
        kind = _kind_of(hints[each.name])
        if each.name in repeated:
            kind = list[kind]  # type: ignore[valid-type]
        name = str(each.metadata.get("option", each.name)).replace("_", "-")
        negated = kind is bool and not each.metadata.get("flag")
        names = f"--{name}/--no-{name}" if negated else f"--{name}"
        option = typer.Option(names, help=text, rich_help_panel=panel, show_default=False)
        yield inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
        )


def with_options(*options: inspect.Parameter) -> Callable[[F], F]:
    """Return a decorator that gives a command these options in the place of its ``**settings``."""

    def decorate(command: F) -> F:
        signature = inspect.signature(command, eval_str=True)
        kept = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        made = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept]
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*made, *options]
        )
        return command

    return decorate


def _kind_of(hint: Any) -> Any:
    """The type of an option for a field of this type.

    >>> _kind_of(tuple[float, ...] | None), _kind_of(Literal["sgd", "adam"]), _kind_of(int)
    (list[float], <class 'str'>, <class 'int'>)
    """
    if get_origin(hint) in (Union, UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is Literal:
        return str  # the configuration itself refuses others, in one line
    if get_origin(hint) is tuple:
        return list[get_args(hint)[0]]  # type: ignore[misc]
    return hint
