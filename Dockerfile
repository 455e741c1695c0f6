FROM debian:bookworm
WORKDIR /moeblaze_ref
COPY . .
RUN scripts/set_up.sh TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
