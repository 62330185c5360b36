"""Nodes that say something of the same run at once, and what another one said meanwhile: nothing of it is lost."""

from pathlib import Path

from paths.joint_kit import RUN, job

EVERY_3 = f'[[policy]]\nrun = "{RUN}"\nevery = 3\n'


async def test_a_word_that_was_read_while_another_was_said_is_heeded(tmp_path: Path) -> None:
    """Who decides is refused once, since a pin elsewhere has taken a skip back: it reads that, and does so as well."""
    async with job(tmp_path, EVERY_3) as all_nodes:
        first, other = all_nodes.nodes
        for step in (1, 2, 3):
            await all_nodes.save(step)
            await all_nodes.turns()
        assert all_nodes.where(2) == [["skipped"]] * 2
        await other.retention.pin(RUN, 2, True)
        await other.turn()
        assert (2, True) in all_nodes.verdicts()
        await all_nodes.save(4)
        await other.announcer.step()
        three = first.session(3)
        assert three is not None
        await first.joint.say(three, goes=True)  # before its next look at the document
        await all_nodes.turns(20, 60.0)
        assert all_nodes.where(2) == [["complete"]] * 2


async def test_a_restart_that_says_something_first_still_heeds_what_was_said(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3) as all_nodes:
        first, other = all_nodes.nodes
        for step in (1, 2, 3):
            await all_nodes.save(step)
            await all_nodes.turns()
        await other.retention.pin(RUN, 2, True)
        await other.turn()
        await first.restart()
        three = first.session(3)
        assert three is not None
        await first.joint.say(three, goes=True)
        await all_nodes.turns(20, 60.0)
        assert all_nodes.where(2) == [["complete"]] * 2
