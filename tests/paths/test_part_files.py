"""A part file that care writes again is the one that the commit wrote: a rebuild of the catalog relies on all that it says."""

from pathlib import Path

import pytest

from paths.kit import client_of, serving, tier
from paths.test_care_cut_short import Parts

POLICIES = {
    "all tiers": "",
    "some tiers": '[[policy]]\nrun = "run"\ntiers = ["near"]\n',
    "transient": '[[policy]]\nrun = "run"\ntransient = true\n',
}


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
async def test_it_is_written_again_as_it_was(tmp_path: Path, policy: str, final: bool) -> None:
    """Also where it may go, and how urgently: else what a policy keeps in the cache would drain after a rebuild."""
    tiers = (tier(tmp_path / "near", "near"), tier(tmp_path / "far", "far"))
    async with (
        serving(tmp_path, *tiers, POLICIES[policy], cache_keys='repair = "ask"') as gateway,
        client_of(gateway) as client,
    ):
        part = client.checkpoint("run", 1)
        await part.put("a", b"a" * 2000)
        await part.commit({"loss": 0.5}, final=final)
        (path,) = gateway.node.cache.path.glob("data/*/part-0-*.json")
        before = path.read_bytes()
        path.unlink()
        (found,) = [finding for finding in await Parts(gateway).repair() if finding.kind == "part_file"]
        assert found.outcome == "repaired"
        assert path.read_bytes() == before
