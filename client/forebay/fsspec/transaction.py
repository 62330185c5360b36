"""`with fs.transaction:` the steps that are written in the block are committed at its end, or are as they were before it.

Owns what is put back. Each step is committed by itself: where one of several fails, those before it stay committed.
"""

from typing import TYPE_CHECKING, Any

from fsspec.transaction import Transaction

from forebay.fsspec.contents import Content
from forebay.fsspec.errors import host_errors
from forebay.fsspec.open_steps import OpenStep
from forebay.fsspec.tree import Tree

if TYPE_CHECKING:
    from forebay.fsspec.filesystem import ForebayFileSystem


class StepTransaction(Transaction):
    """What fsspec opens and completes. One block at a time for an instance, as with every file system of fsspec."""

    fs: "ForebayFileSystem"

    def __init__(self, fs: "ForebayFileSystem", **kwargs: Any) -> None:
        super().__init__(fs, **kwargs)
        self._before: dict[OpenStep, tuple[Tree[Content], bool, dict[str, str]]] = {}

    def touch(self, step: OpenStep) -> None:
        """The step is about to be changed."""
        with step.lock:
            self._before.setdefault(step, (step.tree.copy(), step.made, dict(step.failed)))

    def complete(self, commit: bool = True) -> None:
        """The end of the block. Raises as ForebayFileSystem.commit(); what was not committed is then undone."""
        fs = self.fs
        fs._intrans = False
        fs._transaction = None
        try:
            with host_errors():
                if commit:
                    self._commit(fs)
        finally:
            for file in self.files:
                file.discard()
            self.files.clear()
            for step, before in self._before.items():
                _put_back(fs, step, *before)
            self._before.clear()

    def _commit(self, fs: "ForebayFileSystem") -> None:
        for step in list(self._before):
            if not step.ended and (step.tree.files or step.failed or step.is_written):
                fs._commit(step, beside_writers=False)
            del self._before[step]


def _put_back(fs: "ForebayFileSystem", step: OpenStep, tree: Tree[Content], made: bool, failed: dict[str, str]) -> None:
    with step.lock:
        if step.ended:
            return
        step.tree, step.made, step.failed = tree, made, failed
        if not step.visible:
            fs._steps.close(step)
