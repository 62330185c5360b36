"""`queue hold` and `queue release`: stop and resume the drain."""

from typing import Annotated

import typer

from forebay.cli.app import Json, client
from forebay.cli.output import print_json, say

_Tier = Annotated[str, typer.Argument(metavar="TIER", help="One tier; all unless given.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    group = typer.Typer(help="Stop and resume the drain.", no_args_is_help=True, rich_markup_mode=None)
    group.command("hold")(hold)
    group.command("release")(release)
    app.add_typer(group, name="queue")


def hold(tier: _Tier = "", json: Json = False) -> int:
    """Stop draining; what is saved stays in the cache. JSON keys: held, tiers."""
    return _set(tier, True, json)


def release(tier: _Tier = "", json: Json = False) -> int:
    """Resume draining. JSON keys: held, tiers."""
    return _set(tier, False, json)


def _set(tier: str, held: bool, json: bool) -> int:
    with client() as gateway:
        tiers = gateway.hold(tier) if held else gateway.release(tier)
    if json:
        print_json({"held": held, "tiers": tiers})
    else:
        say(f"{'held' if held else 'released'}: {', '.join(tiers) or 'no tiers'}")
    return 0
