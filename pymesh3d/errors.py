"""The errors users meet. Each says what was given, which rule it breaks, and at least one way out."""


class ConfigError(ValueError):
    """A request that cannot run, refused before any communication.

    `given` names the values as the user gave them, `rule` is the rule they break, `instead` is something that works.
    """

    def __init__(self, given: str, rule: str, instead: str) -> None:
        super().__init__(f"{given}: {rule}. {instead}")
        self.given = given
        self.rule = rule
        self.instead = instead


class DataError(ConfigError):
    """A corpus that cannot be trained on: missing, unreadable, empty, too short, or with ids outside the vocabulary."""


class CheckpointError(ConfigError):
    """A checkpoint that is not complete, or was written by another model or layout."""


class DistributedError(RuntimeError):
    """A rank, a peer or a link failed. The text names rank, operation, peers and how long it had been waiting."""


class SharingError(DistributedError):
    """Ranks cannot have memory that all of them read and write. All of them raise it."""
