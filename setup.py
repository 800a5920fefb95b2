"""What the distribution `coordinator-tf` is called, needs and installs. Settings of the tools are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def read_version() -> str:
    """Returns the version that the package states, without importing it."""
    source = (HERE / "coordinator" / "version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if match is None:
        raise RuntimeError('coordinator/version.py has no line of the form __version__ = "1.2.3".')
    return match.group(1)


setup(
    name="coordinator-tf",
    version=read_version(),
    description="Single-client coordinator for parameter-server training on TensorFlow",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "coordinator/dashboard/page/uPlot.LICENSE"],
    packages=find_packages(include=["coordinator", "coordinator.*"]),
    package_data={"coordinator": ["py.typed", "**/*.pyi", "dashboard/page/*"]},
    python_requires=">=3.11",
    # Each line has its reason in CONTRIBUTING.md. TensorFlow is held to one minor version, because the strategy reaches
    # its private API and another minor version is another runtime, to be tested before it is allowed. Keras is held to
    # the minor versions that all tests have passed with, of 3.16 its nightly build, for its private names.
    install_requires=[
        "grpcio>=1.70,<2",
        "h5py>=3.11,<4",
        "keras>=3.15,<3.17",
        "lazy-loader>=0.5",
        "numpy>=2,<3",
        "portpicker>=1.6,<2",
        "protobuf>=6.31,<8",
        "psutil>=7.1,<8",
        "PyYAML>=6.0.1,<7",
        "rich>=13.9,<16",
        "setproctitle>=1.3.3,<2",
        # Simulations add a kind of event to it, which another major release may not bear.
        "simpy>=4.1,<5",
        # TensorFlow imports it when a summary is written, and does not bring it along.
        "tensorboard>=2.20,<3",
        "tensorflow>=2.21,<2.22",
    ],
    extras_require={
        # Parquet and CSV files of `coordinator data convert`; the progress bar of epochs.
        "data": [
            "pyarrow>=20,<27",
            "tqdm>=4.66",
        ],
        # The pictures of simulations.
        "plots": [
            "matplotlib>=3.9,<4",
        ],
        # The staleness test-bed: its data, its progress bar, its pictures.
        "testbed": [
            "matplotlib>=3.9,<4",
            "scikit-learn>=1.5",
            "tqdm>=4.66",
        ],
        "test": [
            "grimp>=3.14,<4",
            "import-linter>=2.16,<3",
            "ipykernel>=7,<8",
            "matplotlib>=3.9,<4",
            "mypy>=1.15",
            "nbclient>=0.11,<1",
            "pre-commit>=4",
            "pyarrow>=20,<27",
            "pytest>=8.4",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.12",
            "tf_keras>=2.21,<2.22",
        ],
        # What tests marked `release` need besides: the schemas of Kubernetes and of JobSet, and a driver of browsers
        # for Debian's packages chromium and chromium-driver. One needs Debian's prometheus, too.
        "release": [
            "kubeflow-trainer-api>=2.3,<3",
            "kubernetes-validate>=1.37",
            "selenium>=4.20,<5",
        ],
        # The documentation as a site.
        "docs": [
            "furo>=2025.7",
            "myst-parser>=4",
            "sphinx>=8.2,<10",
            "sphinx-argparse-cli>=1.20",
        ],
        "examples": [
            "scikit-learn>=1.5",
            "tqdm>=4.66",
        ],
    },
    entry_points={"console_scripts": ["coordinator = coordinator.__main__:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
