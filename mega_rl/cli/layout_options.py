"""Options of commands as fields of dataclasses; `--tp`, `--pp` and the others of a layout, declared once. No torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from mega_rl.errors import UserError
from mega_rl.parallel.layout import ParallelLayout, parse_pipeline

Made = TypeVar("Made")
Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a packaged recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that replace the recipe's, as optim.lr=2e-6."),
]


@dataclass(frozen=True)
class LayoutOptions:
    """Sizes of a layout as a command line gives them; every field is an option."""

    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel size.")] = 1
    pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline-parallel size.")] = 1
    vpp: Annotated[int, typer.Option("--vpp", min=1, help="Virtual pipeline stages per pipeline rank.")] = 1
    ep: Annotated[int, typer.Option("--ep", min=1, help="Expert-parallel size.")] = 1
    etp: Annotated[int | None, typer.Option("--etp", min=1, help="Tensor-parallel size of experts; default: --tp.")] = (
        None
    )
    pp_layout: Annotated[
        str | None,
        typer.Option(
            "--pp-layout", metavar="LAYOUT", help='Layers of each stage in Megatron-Core\'s notation: "Ett|tt|t|tL".'
        ),
    ] = None

    def layout(self) -> ParallelLayout:
        """Return the layout of the smallest world with these sizes. Raises UserError when there is none."""
        etp = self.tp if self.etp is None else self.etp
        try:
            pipeline = None if self.pp_layout is None else parse_pipeline(self.pp_layout)
            world_size = self.pp * math.lcm(self.tp, self.ep * etp)
            return ParallelLayout(
                world_size=world_size,
                tp=self.tp,
                pp=self.pp,
                vpp=self.vpp,
                ep=self.ep,
                etp=etp,
                pipeline=pipeline,
            )
        except ValueError as error:
            raise UserError(str(error)) from error


def choose(option: str, value: str, allowed: Sequence[str]) -> None:
    """Raise UserError for a value of an option that is not among those allowed."""
    if value not in allowed:
        raise UserError(f"{option}={value}: must be one of {', '.join(allowed)}")


def made(make: Callable[..., Made], options: object, /, **own: object) -> Made:
    """Call `make` with `own`, and with the options that it has parameters of the same names for."""
    shared = vars(options).keys() & inspect.signature(make).parameters.keys()
    return make(**{name: vars(options)[name] for name in shared} | own)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer in which a parameter whose type is a dataclass of options is one option per field."""
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        options = [parameter]
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            options = _options_of(parameter.annotation)
        parameters += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]

    def call(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()
        }
        command(**made, **given)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _options_of(kind: type) -> list[inspect.Parameter]:
    """Return one keyword-only parameter for each field of a dataclass; a field without a default must be given."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[field.name],
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(kind)
    ]
