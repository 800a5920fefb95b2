"""Tests that a simulation starts quickly: it loads no TensorFlow, and matplotlib only to draw."""

from tests.program_runner import ProgramRunner


def test_simulating_loads_nothing_heavy_and_other_commands_do_not_load_it(run_program: ProgramRunner) -> None:
    source = """
        import contextlib, sys
        from coordinator.cli.command_line import main
        with contextlib.suppress(SystemExit):
            main(["run", "--help"])
        print([name for name in ("numpy", "simpy", "coordinator.simulation") if name in sys.modules])
        from coordinator import simulation
        learning = simulation.Learning(simulation.SmallNetwork())
        for rule in (simulation.Asynchronous(), simulation.StaleSynchronous(2, 4), simulation.ModelAverage()):
            simulation.simulate(simulation.Setting(rule=rule, pushes=100, learning=learning))
        print([name for name in ("keras", "matplotlib", "tensorflow") if name in sys.modules])
    """
    assert run_program(source, fresh=True).stdout.endswith("\n[]\n[]\n")
