"""Sections of the run configuration: each option, its default and its meaning.

An option has the name of its field in kebab case, unless the field says otherwise. ``None`` stands
for "auto". `vfl_flower.config` reads the sections.
"""

from vfl_flower.sections.data import DataConfig
from vfl_flower.sections.messages import CodecConfig, ScheduleConfig
from vfl_flower.sections.models import ModelConfig
from vfl_flower.sections.option import key
from vfl_flower.sections.privacy import PrivacyConfig
from vfl_flower.sections.running import RunningConfig
from vfl_flower.sections.training import EstimatorConfig, TrainingConfig

__all__ = [
    "CodecConfig",
    "DataConfig",
    "EstimatorConfig",
    "ModelConfig",
    "PrivacyConfig",
    "RunningConfig",
    "ScheduleConfig",
    "TrainingConfig",
    "key",
]
