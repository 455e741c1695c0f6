"""A reader's update of the router's bias, measured on tokens that it has not seen."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from moeblaze_ref.course.exercises.projects.session import Row, Session, tensor
from moeblaze_ref.verify import torch_cells
from moeblaze_ref.verify.cases import log_popularity
from moeblaze_ref.verify.torch_cells.router import Skewed, chosen

TOKENS, STEPS, UNSEEN = 512, 300, 8192
UNSEEN_SEED = 10**6  # beyond those of the steps
BOUND = 1.15  #: of the imbalance: rows of the fullest expert over rows of an expert on average

ROUTERS = {
    "Zipf, E=16 k=2": Skewed(log_popularity("zipf", 16, 2).astype(np.float32), 2, TOKENS, STEPS, 0),
    "one hot expert, E=8 k=1": Skewed(log_popularity("hot", 8, 1, margin=3.0).astype(np.float32), 1, TOKENS, STEPS, 1),
    "shunned experts, E=12 k=4": Skewed(
        log_popularity("empty", 12, 4, margin=3.0).astype(np.float32), 4, TOKENS, STEPS, 2
    ),
}


@dataclass(frozen=True)
class Balanced:
    """A project of a function that updates the bias."""

    defines: str
    refused: tuple[str, ...] = ()

    def rows(self, cell: torch_cells.Cell, session: Session) -> Iterator[Row]:
        """Train the bias of every router, and choose with it for tokens that the function has not seen."""
        work = partial(torch_cells.router.train, cell, [*ROUTERS.values()])
        answers = session.ask(work, len(ROUTERS))
        for (name, router), answer in zip(ROUTERS.items(), answers, strict=True):
            yield _row(name, router, tensor(answer.get("bias")))


def _row(name: str, router: Skewed, bias: np.ndarray) -> Row:
    if bias.shape != router.popularity.shape or not np.isfinite(bias).all():
        return Row(name, "", f"the bias is {bias.tolist()}, but it must be {router.popularity.size} finite numbers")
    logits = router.logits(UNSEEN_SEED, UNSEEN)
    own, found = chosen(logits, torch.zeros(len(bias)), router.k), chosen(logits, torch.from_numpy(bias), router.k)
    before, after = imbalance(own, len(bias)), imbalance(found, len(bias))
    kept = (own[:, :, None] == found[:, None, :]).sum().item() / own.numel()
    problem = f"the fullest expert gets {after:.2f} times the average, but at most {BOUND} is allowed"
    counted = f"imbalance {before:.2f} without the bias, {after:.2f} with it; {kept:.0%} of the choice is as without it"
    return Row(name, counted, "" if after <= BOUND else problem)


def imbalance(topk_experts: torch.Tensor, num_experts: int) -> float:
    """Rows of the fullest expert over rows of an expert on average."""
    counts = torch.bincount(topk_experts.flatten(), minlength=num_experts)
    return (counts.max() / counts.double().mean()).item()


BIAS = Balanced("update")
