"""`--tp`, `--pp` and the other options of a layout, declared once for every command that has them. Imports no torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

from mega_rl.errors import UserError
from mega_rl.parallel.layout import ParallelLayout, parse_pipeline


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


def with_layout(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer in which the parameter `sizes: LayoutOptions` is one option per field."""
    hints = get_type_hints(LayoutOptions, include_extras=True)
    names = [field.name for field in fields(LayoutOptions)]
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        options = [parameter]
        if parameter.annotation is LayoutOptions:
            options = [
                parameter.replace(name=field.name, annotation=hints[field.name], default=field.default)
                for field in fields(LayoutOptions)
            ]
        parameters += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]

    def call(**given: Any) -> None:
        command(sizes=LayoutOptions(**{name: given.pop(name) for name in names}), **given)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
