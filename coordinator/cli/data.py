"""`coordinator data`: prepares data for training."""

import argparse


def add_data(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "prepare data for training"
    kinds = commands.add_parser("data", help=text, description=text, allow_abbrev=False).add_subparsers(
        dest="kind", required=True, metavar="COMMAND"
    )
    text = "convert Parquet and CSV files to TFRecord files, which workers can read"
    converting = kinds.add_parser("convert", help=text, description=text, allow_abbrev=False)
    converting.add_argument("paths", nargs="+", metavar="FILE", help="a .parquet or .csv file")
    converting.add_argument("folder", metavar="FOLDER", help="where the TFRecord files are written")


def data(options: argparse.Namespace) -> int:
    """Runs the command, and prints how to read the files; returns its exit code."""
    from coordinator.data.conversion import convert

    print(convert(options.paths, options.folder))
    return 0
