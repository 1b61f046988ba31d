"""Options that commands share, declared once, and options as fields of dataclasses."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from mega_rl.data.downloads import checkpoint_folder
from mega_rl.errors import UserError
from mega_rl.parallel.layout import ParallelLayout, parse_pipeline

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a packaged recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that replace the recipe's, as optim.lr=2e-6."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@dataclass(frozen=True)
class LayoutOptions:
    """Sizes of a layout; every field is an option."""

    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1
    pp: Annotated[int, typer.Option(min=1, help="Pipeline-parallel size.")] = 1
    vpp: Annotated[int, typer.Option(min=1, help="Virtual pipeline stages per pipeline rank.")] = 1
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel size.")] = 1
    etp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel size of experts; default: --tp.")] = None
    pp_layout: Annotated[
        str | None,
        typer.Option(metavar="LAYOUT", help='Layers of each stage in Megatron-Core\'s notation: "Ett|tt|t|tL".'),
    ] = None

    def layout(self) -> ParallelLayout:
        """Return the layout of the smallest world with these sizes. Raises UserError when there is none."""
        tp, pp, vpp, ep = self.tp, self.pp, self.vpp, self.ep
        etp = tp if self.etp is None else self.etp
        try:
            pipeline = None if self.pp_layout is None else parse_pipeline(self.pp_layout)
            world_size = pp * math.lcm(tp, ep * etp)
            return ParallelLayout(world_size=world_size, tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, pipeline=pipeline)
        except ValueError as error:
            raise UserError(str(error)) from error


def checkpoint(context: typer.Context, parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Return a checkpoint argument's folder; a name on the Hub is downloaded whole. Raises UserError."""
    if value is None or context.resilient_parsing:  # shell completion runs nothing
        return value
    option = next((name for name in parameter.opts if name.startswith("-")), None)
    label = option or (parameter.metavar or str(parameter.name).upper()).strip("[]")
    return checkpoint_folder(value, label=label)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer whose parameters of a dataclass type become one option per field."""
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            groups[parameter.name] = kind
            hints = get_type_hints(kind, include_extras=True)
            parameters += [
                parameter.replace(
                    name=field.name,
                    annotation=hints[field.name],
                    default=parameter.empty if field.default is MISSING else field.default,
                )
                for field in fields(kind)
            ]
        else:
            parameters.append(parameter)
    parameters = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in parameters]

    def call(**given: Any) -> None:
        options = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()
        }
        command(**options, **given)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
