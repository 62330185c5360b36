"""What a storage class of DCP is about: the checkpoint that was named to it."""

from forebay.checkpoint_id import CheckpointId


class Named:
    """Base of reader and writer; either may be told later, in DCP's own call."""

    _id: CheckpointId | None

    @property
    def checkpoint_id(self) -> str | None:
        """forebay://RUN/STEP; None as long as nothing was named."""
        return None if self._id is None else str(self._id)
