"""Settings: one typed tree (`tree`), and where its values come from (`load`)."""

from emailrl.settings.learning import AlgorithmSettings, EvaluationSettings, SftSettings, TrainingSettings
from emailrl.settings.load import PRESETS, beyond_defaults, folder_risks, load_settings, trust_folder
from emailrl.settings.servers import OpenAISettings, VllmSettings
from emailrl.settings.tree import (
    DEFAULT_DB,
    AgentSettings,
    BenchmarkSettings,
    DataSettings,
    GenerationSettings,
    LoraSettings,
    ModelSettings,
    OutputSettings,
    PlayingSettings,
    PolicySettings,
    RewardSettings,
    RewardWeightSettings,
    Settings,
    StoreSettings,
    TrackingSettings,
)
from emailrl.settings.trust import Untrusted

__all__ = ["DEFAULT_DB", "PRESETS", "AgentSettings", "AlgorithmSettings", "BenchmarkSettings", "DataSettings"]
__all__ += ["EvaluationSettings", "GenerationSettings", "LoraSettings", "ModelSettings", "OpenAISettings"]
__all__ += ["OutputSettings", "PlayingSettings", "PolicySettings", "RewardSettings", "RewardWeightSettings"]
__all__ += ["Settings", "SftSettings", "StoreSettings", "TrackingSettings", "TrainingSettings", "Untrusted"]
__all__ += ["VllmSettings", "beyond_defaults", "folder_risks", "load_settings", "trust_folder"]
