# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0

"""Trains what the configuration says: `cosmos-train`, or `scripts/train.py` under torchrun."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.utils import get_object
from omegaconf import DictConfig

from cosmos_framework.data.action_chunks import ActionChunkDatasetConfig, TrainLoaderConfig, ValidationLoaderConfig
from cosmos_framework.model.action_policy import ActionPolicyConfig
from cosmos_framework.trainer import ImaginaireTrainer
from cosmos_framework.utils.config import ConfigError, check_config, config_choices, load_config

# The fields of each recipe's parts, for `defaults` in configs/recipe/*.yaml.
RECIPE_SCHEMAS: dict[str, dict[str, type]] = {
    "schema/model": {"action_policy": ActionPolicyConfig},
    "schema/dataset": {"action_chunks": ActionChunkDatasetConfig},
    "schema/dataloader": {"action_chunks_train": TrainLoaderConfig, "action_chunks_val": ValidationLoaderConfig},
}
for group, schemas in RECIPE_SCHEMAS.items():
    for schema_name, schema in schemas.items():
        ConfigStore.instance().store(group=group, name=schema_name, node=schema)


def main(argv: Sequence[str] | None = None) -> int:
    """Composes and checks the configuration, then trains.

    Args:
        argv: Overrides of the configuration; those of the command line if None.

    Returns:
        The exit code: 0, or 2 for a configuration that cannot be run. Nothing exists then that was not there before;
        rank 0 has said on standard error what is wrong.
    """
    overrides = _parser().parse_args(argv).overrides
    is_rank0 = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(
        level=logging.INFO if is_rank0 else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        config = load_config(overrides)
        check_config(config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
        dataloader_train, dataloader_val = build_dataloaders(config)
    except ConfigError as error:
        if is_rank0:
            print(f"error in the configuration: {error}", file=sys.stderr)
        return 2
    # The trainer comes before the model: it seeds the random numbers that initialise the model.
    trainer = ImaginaireTrainer(config)  # type: ignore[arg-type]
    model = get_object(config.model._target_)(config.model, config.dataset)
    trainer.train(model, dataloader_train, dataloader_val)
    return 0


def _parser() -> argparse.ArgumentParser:
    choices = "\n".join(f"  {group}={'|'.join(names)}" for group, names in config_choices().items())
    parser = argparse.ArgumentParser(
        prog="cosmos-train",
        description="Trains a model on all ranks that torchrun starts, or in this process alone.",
        epilog=f"Choices:\n{choices}\nFields: see cosmos_framework/utils/config.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="FIELD=VALUE", help="such as parallelism=hsdp or trainer.max_iter=100"
    )
    return parser


def build_dataloaders(config: DictConfig) -> tuple[Any, Any]:
    """Builds the loaders, which is when a data set that cannot be used is found out.

    Args:
        config: From `load_config`, checked by `check_config`.

    Returns:
        The loader of the training split and that of the held-out split; the latter is None without validation.

    Raises:
        ConfigError: The data set cannot be used.
    """
    train = _build_dataloader(config.dataloader_train, config.dataset)
    return train, _build_dataloader(config.dataloader_val, config.dataset) if config.trainer.run_validation else None


def _build_dataloader(loader: DictConfig, dataset: DictConfig) -> Any:
    # Hydra's instantiate would wrap a ConfigError into an exception of its own.
    fields = {str(name): value for name, value in loader.items() if name != "_target_"}
    return get_object(loader._target_)(dataset, **fields)
