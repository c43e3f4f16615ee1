# The server in a container.
#   docker build -t forerun .                                   for CPUs
#   docker build -t forerun:cuda --build-arg DEVICE=cuda .      for NVIDIA GPUs (run it with --gpus all)
#   docker run -p 8000:8000 -v forerun-cache:/cache -v $PWD/keys.txt:/keys.txt:ro forerun --api-keys /keys.txt
FROM python:3.12-slim

# cuda: the package index's own build, which brings the CUDA libraries; cpu: PyTorch's CPU builds, about a tenth of the size.
ARG DEVICE=cpu
ARG TORCH=torch==2.13.0
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
RUN if [ "$DEVICE" = cuda ]; then pip install --no-cache-dir "$TORCH"; \
    elif [ "$DEVICE" = cpu ]; then pip install --no-cache-dir --index-url "$TORCH_CPU_INDEX" "$TORCH"; \
    else echo "DEVICE is $DEVICE: use cpu or cuda" >&2; exit 1; fi

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY forerun forerun
COPY forerun_research forerun_research
RUN pip install --no-cache-dir ".[serve]" && rm -rf /src/*

RUN useradd --create-home forerun && mkdir /cache && chown forerun /cache
USER forerun
WORKDIR /home/forerun
ENV FORERUN_HOME=/cache
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=3)"
ENTRYPOINT ["forerun", "serve", "--host", "0.0.0.0"]
