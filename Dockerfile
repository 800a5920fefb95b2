# An image with the library and the command `coordinator`, for servers and for programs:
#
#   docker build -t coordinator-tf .
#   docker run --rm --init -v "$PWD":/work coordinator-tf run --workers 2 --ps 1 program.py
#
# `--build-arg TENSORFLOW='tensorflow[and-cuda]'` installs the libraries for GPUs. Programs that need other packages
# have an image of their own: FROM coordinator-tf, then RUN pip install ...
FROM python:3.11-slim AS build
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.11-slim
ARG TENSORFLOW=tensorflow
# The wheel decides the versions.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir /wheels/*.whl "$TENSORFLOW" \
    && useradd --create-home --uid 1000 trainer
USER 1000
WORKDIR /work
ENTRYPOINT ["coordinator"]
