"""Tests that a simulation starts quickly: it loads no TensorFlow, and matplotlib only to draw."""

import coordinator
from coordinator import simulation
from tests.program_runner import ProgramRunner

HEAVY = ("grpc", "keras", "matplotlib", "tensorflow")


def test_simulating_loads_nothing_heavy(run_program: ProgramRunner) -> None:
    source = """
        import sys
        from coordinator import simulation
        rules = [simulation.Asynchronous(), simulation.Synchronous(2), simulation.StaleSynchronous(2, 4),
                 simulation.BoundedDelay(3), simulation.ModelAverage()]
        learning = simulation.Learning(simulation.SmallNetwork())
        for rule in rules:
            simulation.simulate(simulation.Setting(rule=rule, pushes=100, learning=learning))
        print([name for name in sys.argv[1:] if name in sys.modules])
    """
    assert run_program(source, *HEAVY, fresh=True).stdout == "[]\n"


def test_the_other_commands_do_not_load_the_simulation(run_program: ProgramRunner) -> None:
    source = """
        import sys
        from coordinator.cli.command_line import main
        try:
            main(["run", "--help"])
        except SystemExit:
            pass
        print([name for name in ("numpy", "simpy", "coordinator.simulation") if name in sys.modules])
    """
    assert run_program(source, fresh=True).stdout.endswith("\n[]\n")


def test_every_public_name_is_there() -> None:
    assert coordinator.simulation is simulation
    for name in simulation.__all__:
        assert getattr(simulation, name).__name__ == name
        assert name in dir(simulation)
