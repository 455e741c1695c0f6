"""Models and settings of ``moeblaze train --preset``."""

from moeblaze_ref.core import checks
from moeblaze_ref.lm.model import LMConfig
from moeblaze_ref.lm.train import TrainSettings

SETTINGS = {
    "tiny": TrainSettings(
        LMConfig(d=64, h=128, E=8, k=2, layers=2, heads=4, sequence=128),
        steps=200,
        batch=8,
        learning_rate=6e-3,
        warmup=10,
        final_fraction=0.1,
    ),
    "lm-small": TrainSettings(
        LMConfig(d=512, h=1024, E=16, k=2, layers=8, heads=8, sequence=512),
        steps=2000,
        batch=32,
        learning_rate=6e-4,
        warmup=100,
        final_fraction=0.1,
        weight_decay=0.1,
        precision="bfloat16",
    ),
}


def preset(name: str) -> TrainSettings:
    """The settings of a preset; an unknown name is a ValueError that proposes the nearest one."""
    return SETTINGS[checks.check_name("preset", name, SETTINGS)]
