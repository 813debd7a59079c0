"""The one error that loading a checkpoint raises."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or of a kind that is not supported; the message says which file or field, and why."""
