"""The table of docs/routers.md, from ``core.routers``.

``python -m moeblaze_ref.course.site.routers`` writes it.
"""

from moeblaze_ref.core import documents
from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.core.routers import FAMILIES, Family, Router

DOCUMENT = DOCS / "routers.md"
_SCORES = {
    "softmax": "softmax of all logits",
    "softmax_of_chosen": "softmax of the chosen logits",
    "sigmoid": "sigmoid of each logit",
}
_GROUP_SCORES = {"max": "best expert", "top2": "two best experts, added up"}
_SHARED = {"none": "", "plain": "yes", "gated": "yes, times a sigmoid"}


def table() -> str:
    """Return a row for each family: what its router does, step by step."""
    names = ["family", "numbers of", "logits", "scores", "choice", "gates", "shared expert", "from config.json"]
    return documents.table(names, [_row(name, family) for name, family in FAMILIES.items()], words=len(names))


def _row(name: str, family: Family) -> list[str]:
    router = family.router
    read = ", ".join(f"`{theirs}`" for theirs in family.from_config.values())
    steps = [_logits(router), _SCORES[router.scores], _choice(router), _gates(router)]
    return [f"`{name}`", family.model, *steps, _SHARED[family.shared], read]


def _logits(router: Router) -> str:
    """Say how x and wg become logits."""
    return ("in float32" if router.float32_product else "in the dtype of x") + ", a bias" * router.logit_bias


def _choice(router: Router) -> str:
    """Say which experts are chosen."""
    steps = ["add the selection bias"] if router.selection_bias else []
    if router.groups > 1:
        steps.append(f"{router.groups_kept} of {router.groups} groups by their {_GROUP_SCORES[router.group_score]}")
    return "; ".join([*steps, "k largest"])


def _gates(router: Router) -> str:
    """Say what becomes of the chosen scores."""
    divisor = f"sum + {router.epsilon:g}" if router.epsilon else "sum"
    steps = [f"over their {divisor}"] if router.renormalize else ["the scores"]
    steps += [f"times {router.scale:g}"] if router.scale != 1.0 else []
    steps += ["multiply the experts' inputs"] if router.weighs == "input" else []
    return ", ".join(steps)


def page(text: str) -> str:
    """Return the page with its table written anew."""
    return documents.fill(text, {"routers": table})


if __name__ == "__main__":
    DOCUMENT.write_text(page(DOCUMENT.read_text()))
