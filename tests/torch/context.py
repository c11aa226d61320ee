"""What a rank of a test knows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

JOB = "gpt"


@dataclass
class Context:
    rank: int
    world: int
    mount: Path
    where: Path

    @property
    def job(self) -> Path:
        return self.mount / JOB
