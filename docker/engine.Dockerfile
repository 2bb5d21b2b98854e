# The engine, for processors (--target cpu) and for NVIDIA GPUs (--target cuda).
#   docker build --file docker/engine.Dockerfile --target cpu --tag quire-engine:0.1.0-cpu .
#   docker build --file docker/engine.Dockerfile --target cuda --tag quire-engine:0.1.0-cuda .
# docker/README.md says where torch and FlashInfer are taken from.

# The Python that the tests run with. BASE_DIGEST (sha256:…) pins the image's contents.
ARG BASE=python:3.11.15-slim-bookworm
ARG BASE_DIGEST=

# Everything but torch, as wheels, and the environment that both targets add their torch to.
FROM ${BASE}${BASE_DIGEST:+@${BASE_DIGEST}} AS build
# Where pip looks besides its own index, such as a mirror; the file:// of a folder too.
ARG EXTRA_INDEX=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_EXTRA_INDEX_URL=${EXTRA_INDEX}
RUN apt-get update -q \
 && apt-get install -qy --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
RUN python -m venv --without-pip /opt/quire
WORKDIR /src
COPY constraints.txt ./

# torch comes first: it is large, and changes less often than what is below it.
FROM build AS cpu-build
# The index of torch's builds for processors. pip prefers its builds (2.13.0+cpu to 2.13.0), and goes on with its own index
# alone where this one cannot be reached.
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m pip --python /opt/quire/bin/python install --quiet --constraint constraints.txt torch \
      ${TORCH_CPU_INDEX:+--extra-index-url "${TORCH_CPU_INDEX}"} \
 && /opt/quire/bin/python -c "import sys, torch; sys.exit(torch.version.cuda and 'This torch is a CUDA build of several GB: set TORCH_CPU_INDEX to an index that has one for processors.')"
COPY proto ./proto
COPY engine ./engine
RUN python -m pip --python /opt/quire/bin/python install --quiet --constraint constraints.txt ./proto ./engine
# For every kind of processor, not only for this one: the image has no compiler, and its root may be read-only.
RUN /opt/quire/bin/python -m quire_engine.kernels
# A quarter of the size: tests, and the files for compiling against torch.
RUN find /opt/quire -type d -name tests -prune -exec rm -r {} + \
 && rm -rf /opt/quire/lib/python*/site-packages/torch/include /opt/quire/lib/python*/site-packages/torch/test

FROM build AS cuda-build
# The index of torch's builds for one version of CUDA, as torch's installation page names it; else pip's own.
ARG TORCH_CUDA_INDEX=
RUN python -m pip --python /opt/quire/bin/python install --quiet --constraint constraints.txt torch \
      ${TORCH_CUDA_INDEX:+--index-url "${TORCH_CUDA_INDEX}"} \
 && /opt/quire/bin/python -c "import sys, torch; sys.exit(None if torch.version.cuda else 'This torch is no CUDA build: set TORCH_CUDA_INDEX.')"
COPY proto ./proto
COPY engine ./engine
RUN python -m pip --python /opt/quire/bin/python install --quiet --constraint constraints.txt ./proto "./engine[cuda]"
# FlashInfer's kernels, compiled by its makers, of exactly the version that was installed, and for torch's CUDA. Without
# them it would compile at the first start, which takes minutes, nvcc, and a root that can be written to. From 0.7 on this
# package is empty: the kernels of each kind of GPU are packages that it depends on.
ARG FLASHINFER_INDEX=
RUN test -n "${FLASHINFER_INDEX}" || { echo "Set FLASHINFER_INDEX: the index of flashinfer-jit-cache for torch's CUDA." >&2; exit 1; } \
 && version=$(/opt/quire/bin/python -c "from importlib.metadata import version; print(version('flashinfer-python'))") \
 && python -m pip --python /opt/quire/bin/python install --quiet \
      --index-url "${FLASHINFER_INDEX}" "flashinfer-jit-cache==${version}"
RUN /opt/quire/bin/python -m quire_engine.kernels

# All of both targets but their environment.
FROM ${BASE}${BASE_DIGEST:+@${BASE_DIGEST}} AS runtime
LABEL org.opencontainers.image.title="quire-engine" \
      org.opencontainers.image.description="Quire's engine: paged KV memory, continuous batching, swapping" \
      org.opencontainers.image.licenses="Apache-2.0"
# Package installers and setuid programs are not needed at run time.
RUN python -m pip uninstall --quiet --yes setuptools wheel pip \
 && find / -xdev -type f -perm /6000 -exec chmod a-s {} + \
 && groupadd --gid 10001 quire \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin quire
COPY LICENSE /usr/share/doc/quire/LICENSE
# The root may be read-only: libraries write their caches to /tmp. The user may be one that no file names, as on OpenShift, so
# that home and name are here.
ENV PATH=/opt/quire/bin:${PATH} \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    USER=quire \
    XDG_CACHE_HOME=/tmp/cache \
    QUIRE_ENGINE_HOST=0.0.0.0
WORKDIR /tmp
# gRPC, metrics and health.
EXPOSE 9000 9002
ENTRYPOINT ["quire-engine"]

FROM runtime AS cuda
# Triton, which --deterministic uses, compiles a launcher of some lines in C for each of its kernels.
RUN apt-get update -q \
 && apt-get install -qy --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY --from=cuda-build /opt/quire /opt/quire
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    FLASHINFER_WORKSPACE_BASE=/tmp \
    TRITON_CACHE_DIR=/tmp/triton \
    QUIRE_ENGINE_DEVICE=cuda
USER 10001:10001
# Last, as they change with every build.
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# The last stage is what a build without --target makes.
FROM runtime AS cpu
COPY --from=cpu-build /opt/quire /opt/quire
ENV QUIRE_ENGINE_DEVICE=cpu
USER 10001:10001
# Last, as they change with every build.
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
