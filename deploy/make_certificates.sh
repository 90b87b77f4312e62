#!/bin/sh
# Certificates for mTLS inside one cluster, for a trial: sh deploy/make_certificates.sh DIR [DAYS]
# Makes an authority of the cluster's own and one certificate per part, as `baton up --tls-dir DIR` reads them. Run again, it
# renews the parts' certificates under the same authority. Whoever has DIR/ca.key can join the cluster: keep it elsewhere.
set -eu
umask 077
mkdir -p "$1" && cd "$1"
days=${2:-30}
request() {
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "$@"
}
[ -e ca.key ] || request -days 3650 -subj "/CN=baton cluster authority" -keyout ca.key -out ca.crt
for part in router worker controller; do
  new=$part/.new  # a process that looks meanwhile must not find the new key beside the old certificate for long
  mkdir -p "$new"
  request -days "$days" -CA ca.crt -CAkey ca.key -subj "/CN=baton $part" \
    -addext "subjectAltName=DNS:$part.baton.internal" -addext "basicConstraints=critical,CA:FALSE" \
    -addext "extendedKeyUsage=serverAuth,clientAuth" -keyout "$new/tls.key" -out "$new/tls.crt"
  cp ca.crt "$new/"
  mv "$new/ca.crt" "$new/tls.crt" "$new/tls.key" "$part/"
  rmdir "$new"
done
