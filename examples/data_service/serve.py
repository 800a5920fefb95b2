"""Serves preprocessed data to training workers: TensorFlow's data service, one process for each of its servers.

python examples/data_service/serve.py dispatcher --port 5050 --work-dir logs/dispatcher
python examples/data_service/serve.py worker --port 5051 --dispatcher localhost:5050
python examples/data_service/serve.py worker --port 5052 --dispatcher localhost:5050

Start a server again with the same arguments if it dies. docs/data_service.md says what is lost then.
"""

import argparse

import tensorflow as tf

service = tf.data.experimental.service


def main(arguments):
    if arguments.kind == "dispatcher":
        # With a journal in work_dir, a dispatcher that is started again knows what it has handed out.
        config = service.DispatcherConfig(port=arguments.port, work_dir=arguments.work_dir, fault_tolerant_mode=True)
        server = service.DispatchServer(config)
    else:
        config = service.WorkerConfig(
            dispatcher_address=arguments.dispatcher,
            worker_address=f"{arguments.host}:{arguments.port}",
            port=arguments.port,
            heartbeat_interval_ms=1000,
        )
        server = service.WorkerServer(config)
    print(f"{arguments.kind} listens on port {arguments.port}", flush=True)
    server.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["dispatcher", "worker"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="localhost", help="the name of this machine, by which others reach a worker")
    parser.add_argument("--dispatcher", default="localhost:5050", help="host:port, for a worker")
    parser.add_argument("--work-dir", default="logs/dispatcher", help="for the journal of the dispatcher")
    main(parser.parse_args())
