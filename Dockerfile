# syntax=docker/dockerfile:1
# One build, three images: docker build --target control|cpu|cuda .
#   control  activator, control plane, snapshotter: nothing that computes
#   cpu      replicas on processors
#   cuda     replicas on NVIDIA's devices: torch's wheels bring CUDA's libraries, the node its driver
# The base: Debian's glibc, as the wheels of torch and ONNX Runtime are built for it alone; the Python that the tests run
# on; the roots of public authorities; and neither a compiler nor headers.
# For a release name the base by its digest, too: --build-arg BASE=python:3.11-slim-bookworm@sha256:…
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONDONTWRITEBYTECODE=1
# Without pip: it stays here, and installs from outside.
RUN python -m venv --without-pip /opt/kelvin
WORKDIR /src
COPY . .

FROM build AS build-control
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/kelvin/bin/python install --no-compile --constraint constraints.txt '.[s3,redis,postgres,telemetry,cluster]' \
 && python -m compileall -q --invalidation-mode unchecked-hash /opt/kelvin/lib

FROM build AS build-cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/kelvin/bin/python install --no-compile --constraint constraints.txt \
      --extra-index-url https://download.pytorch.org/whl/cpu '.[runtime,onnx,s3,telemetry]' \
 && python -m compileall -q --invalidation-mode unchecked-hash /opt/kelvin/lib

FROM build AS build-cuda
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/kelvin/bin/python install --no-compile --constraint constraints.txt '.[runtime,gpu,onnx,s3,telemetry]' \
 && python -m compileall -q --invalidation-mode unchecked-hash /opt/kelvin/lib

FROM ${BASE} AS final
# The base has no compiled library of Python's own, and nothing can write one where the root is read-only.
RUN groupadd --gid 65532 kelvin \
 && useradd --uid 65532 --gid 65532 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin kelvin \
 && install -d -o 65532 -g 65532 -m 0700 /var/lib/kelvin \
 && test -s /etc/ssl/certs/ca-certificates.crt \
 && python -m pip uninstall -qy pip setuptools wheel \
 && python -m compileall -q --invalidation-mode unchecked-hash -x '/(lib2to3|test|idlelib)/' /usr/local/lib/python3.11
ENV PATH=/opt/kelvin/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /var/lib/kelvin
USER 65532:65532
ENTRYPOINT ["kelvin"]
CMD ["--help"]

FROM final AS control
COPY --from=build-control /opt/kelvin /opt/kelvin

FROM final AS cuda
# Which devices a container sees is the device plugin's to say, by what its pod asks for; here none is named.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/kelvin /opt/kelvin

# The last one is what a build without --target makes.
FROM final AS cpu
COPY --from=build-cpu /opt/kelvin /opt/kelvin
