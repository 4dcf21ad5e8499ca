# SPDX-FileCopyrightText: 2026 The cosmos-framework training-core authors
# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="cosmos-framework",
    version="0.1.0",
    description="A training core for world models: gradient accumulation that saves communication, exactly",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    # The YAML lies beside the package in a checkout and inside it in the wheel.
    packages=[*find_packages(include=["cosmos_framework", "cosmos_framework.*"]), "cosmos_framework.configs"],
    package_dir={"cosmos_framework.configs": "configs"},
    package_data={"cosmos_framework.configs": ["*.yaml", "*/*.yaml"]},
    install_requires=["torch>=2.10", "hydra-core>=1.3", "omegaconf>=2.3", "tqdm"],
    extras_require={
        "sim": ["metaworld", "packaging"],
        "data": ["pyarrow"],
        "report": ["matplotlib"],
        # attrs and pydantic: the stand-ins for upstream in the tests are made of them.
        "dev": ["pytest", "hypothesis", "ruff", "mypy", "attrs", "pydantic"],
        "upstream": ["libcst"],
    },
    entry_points={
        "console_scripts": [
            "cosmos-train=cosmos_framework.scripts.train:main",
            "cosmos-accum-plan=cosmos_framework.scripts.accum_plan:main",
        ]
    },
)
