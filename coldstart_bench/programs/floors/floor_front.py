"""The floor of the front door and what loads it: nginx as a TLS proxy in one process, and wrk in one thread.

`nginx BINARY DIRECTORY PORT UPSTREAM_PORT`, with cert.pem and key.pem in the directory, or
`wrk BINARY DIRECTORY URL CONNECTIONS SECONDS BODY KEY`, whose last line is JSON. Either takes this process's place.
"""

import os
import sys
from pathlib import Path

NGINX = """
daemon off; worker_processes 1; pid {at}/nginx.pid; error_log {at}/error.log; user root;
events {{ worker_connections 1024; }}
http {{
  access_log off; keepalive_requests 1000000;
  client_body_temp_path {at}/body; proxy_temp_path {at}/proxy; fastcgi_temp_path {at}/fastcgi;
  uwsgi_temp_path {at}/uwsgi; scgi_temp_path {at}/scgi;
  upstream one {{ server 127.0.0.1:{upstream}; keepalive 128; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} ssl; ssl_certificate {at}/cert.pem; ssl_certificate_key {at}/key.pem;
    location / {{ proxy_pass http://one; proxy_http_version 1.1; proxy_set_header Connection ""; }}
  }}
}}
"""
WRK = """
wrk.method = "POST"
wrk.body = [[{body}]]
wrk.headers["authorization"] = "Bearer {key}"
wrk.headers["content-type"] = "application/json"
done = function(all, took, rates)
  local e = all.errors
  local bad = e.connect + e.read + e.write + e.status + e.timeout
  io.write(string.format('{{"requests":%d,"us":%d,"p50_us":%d,"p99_us":%d,"bad":%d}}\\n',
    all.requests, all.duration, took:percentile(50), took:percentile(99), bad))
end
"""


def main() -> None:
    """Write the configuration, and become it."""
    what, binary, at = sys.argv[1:4]
    if what == "nginx":
        port, upstream = sys.argv[4:]
        Path(at, "nginx.conf").write_text(NGINX.format(at=at, port=port, upstream=upstream))
        os.execv(binary, [binary, "-c", f"{at}/nginx.conf", "-p", at])  # noqa: S606 - no shell is wanted
    url, connections, seconds, body, key = sys.argv[4:]
    Path(at, "wrk.lua").write_text(WRK.format(body=body, key=key))
    # wrk opens all connections first, and its clock knows whole seconds alone.
    os.execv(binary, [binary, "-t1", f"-c{connections}", f"-d{seconds}s", "-s", f"{at}/wrk.lua", url])  # noqa: S606


if __name__ == "__main__":
    main()
