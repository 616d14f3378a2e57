# docker build -t cloister . && docker run --rm -p 127.0.0.1:8000:8000 cloister
# Inside the container the server binds to every address, so without API keys each request has a scope of its own.
# To serve tenants, mount a key file as the user that owns it (it must be readable by that user alone):
#   docker run --rm -p 8000:8000 --user "$(id -u)" -v "$PWD/keys.json:/keys.json:ro" cloister \
#     serve --host 0.0.0.0 --api-keys /keys.json
# The first stage compiles, for every CPU that the image may meet (--build-arg ISA=native: for the one that builds, in a third of
# the time); the second has neither compiler nor torch.
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ARG ISA=all
# Extras of the package, such as ray (deploy/compose.cluster.yaml, deploy/kubernetes/raycluster.yaml).
ARG EXTRAS=
WORKDIR /build
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY src ./src
RUN python -m venv /opt/cloister \
 && /opt/cloister/bin/pip install --no-cache-dir --config-settings=cmake.define.CLOISTER_ISA="$ISA" ".${EXTRAS:+[$EXTRAS]}" \
 && /opt/cloister/bin/python -c "from cloister.backends.native import _native"

FROM python:3.11-slim
COPY --from=build /opt/cloister /opt/cloister
RUN useradd --system --create-home --uid 10001 cloister \
 && install --directory --owner cloister --group cloister /home/cloister/.cache
ENV PATH=/opt/cloister/bin:$PATH
USER cloister
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
  CMD ["/opt/cloister/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["/opt/cloister/bin/cloister"]
CMD ["serve", "--host", "0.0.0.0"]
