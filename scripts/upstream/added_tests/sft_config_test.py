# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
"""Tests that are appended to upstream's cosmos_framework/configs/toml_config/sft_config_test.py."""

from typing import Any

import pytest
from pydantic import ValidationError

from cosmos_framework.configs.toml_config.sft_config import SFTExperimentConfig  # type: ignore[import-not-found]
from cosmos_framework.configs.toml_config.toml_config_helper import (  # type: ignore[import-not-found]
    build_hydra_overrides,
)


class TestGradientAccumulationFields:
    @staticmethod
    def _recipe(**trainer: Any) -> dict[str, Any]:
        return {"job": {"task": "vfm", "experiment": "vision_sft_nano"}, "trainer": trainer}

    def test_defaults_synchronize_the_replicas_once_a_window(self) -> None:
        trainer = SFTExperimentConfig.model_validate(self._recipe()).trainer
        assert trainer.fsdp_accum_mode == "all_reduce"
        assert trainer.fsdp_accum_reshard is True
        assert trainer.fsdp_reduce_unused_params is False

    @pytest.mark.parametrize("mode", ["all_reduce", "grad_sync", "none"])
    def test_mode_reaches_hydra(self, mode: str) -> None:
        recipe = self._recipe(fsdp_accum_mode=mode)
        SFTExperimentConfig.model_validate(recipe)
        assert f"trainer.fsdp_accum_mode={mode}" in build_hydra_overrides(recipe)

    def test_unknown_mode_raises(self) -> None:
        with pytest.raises(ValidationError, match="fsdp_accum_mode"):
            SFTExperimentConfig.model_validate(self._recipe(fsdp_accum_mode="sometimes"))
