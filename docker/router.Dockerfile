# The router: quire_router, quire_proto and what they import. No torch, no compiler, no pip.
#   docker build --file docker/router.Dockerfile --tag quire-router:0.1.0 .

# The Python that the tests run with. BASE_DIGEST (sha256:…) pins the image's contents.
ARG BASE=python:3.11.15-slim-bookworm
ARG BASE_DIGEST=

FROM ${BASE}${BASE_DIGEST:+@${BASE_DIGEST}} AS build
# Where pip looks besides its own index, such as a mirror; the file:// of a folder too.
ARG EXTRA_INDEX=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_EXTRA_INDEX_URL=${EXTRA_INDEX}
WORKDIR /src
COPY constraints.txt ./
COPY proto ./proto
COPY router ./router
# First builds all wheels, then an environment of nothing but these.
RUN python -m pip wheel --quiet --wheel-dir /wheels --constraint constraints.txt ./proto "./router[kubernetes,kv-events]"
RUN python -m venv --without-pip /opt/quire \
 && python -m pip --python /opt/quire/bin/python install --quiet --no-index --find-links /wheels "quire-router[kubernetes,kv-events]" \
 && find /opt/quire -type d -name tests -prune -exec rm -r {} +

FROM ${BASE}${BASE_DIGEST:+@${BASE_DIGEST}} AS router
LABEL org.opencontainers.image.title="quire-router" \
      org.opencontainers.image.description="Quire's router: OpenAI-style REST and gRPC in front of a fleet of engines" \
      org.opencontainers.image.licenses="Apache-2.0"
# Package installers and setuid programs are not needed at run time.
RUN python -m pip uninstall --quiet --yes setuptools wheel pip \
 && find / -xdev -type f -perm /6000 -exec chmod a-s {} + \
 && groupadd --gid 10001 quire \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin quire
COPY --from=build /opt/quire /opt/quire
COPY LICENSE /usr/share/doc/quire/LICENSE
# The root may be read-only: only --workers writes files, to /tmp. The user may be one that no file names, as on OpenShift, so
# that home and name are here.
ENV PATH=/opt/quire/bin:${PATH} \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    USER=quire \
    QUIRE_ROUTER_HOST=0.0.0.0
USER 10001:10001
WORKDIR /tmp
# REST, gRPC, metrics and health; and, where they are turned on, the metrics API of autoscaling and KEDA's scaler.
EXPOSE 8000 8001 8002 8003 8004
ENTRYPOINT ["quire-router"]
# Last, as they change with every build.
ARG VERSION=0.1.0
ARG REVISION=
LABEL org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
