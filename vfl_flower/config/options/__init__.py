"""Sections of the run configuration: each option, its default and its meaning.

An option has the name of its field in kebab case, unless the field says otherwise. ``None`` stands
for "auto". `vfl_flower.config.run_config` reads the sections.
"""

from vfl_flower.config.options.data import AssessmentConfig, DataConfig
from vfl_flower.config.options.models import ModelConfig
from vfl_flower.config.options.protocol import CodecConfig, PrivacyConfig, ScheduleConfig
from vfl_flower.config.options.running import RunningConfig, ServingConfig
from vfl_flower.config.options.training import EstimatorConfig, TrainingConfig

__all__ = [
    "AssessmentConfig",
    "CodecConfig",
    "DataConfig",
    "EstimatorConfig",
    "ModelConfig",
    "PrivacyConfig",
    "RunningConfig",
    "ScheduleConfig",
    "ServingConfig",
    "TrainingConfig",
]
