# CPU, no root. The bundled model is served unless another one is named: docker run IMAGE MODEL [FLAGS]
FROM python:3.11-slim

# The native kernels are compiled at the first start.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# pip's own index gives a torch with all of CUDA, some gigabytes. For the small build:
# docker build --build-arg TORCH_INDEX=ADDRESS, PyTorch's index of CPU builds (see its "Get started" page).
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"

WORKDIR /build
COPY pyproject.toml hatch_build.py README.md LICENSE NOTICE ./
COPY src ./src
RUN pip install --no-cache-dir '.[server]' && rm -rf /build

RUN useradd --create-home forerun
USER forerun
WORKDIR /home/forerun
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["forerun", "serve", "--host", "0.0.0.0"]
CMD ["bundled"]
