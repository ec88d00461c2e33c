#!/usr/bin/env bash
# Installs a built binary with its unit, users, examples and docs: scripts/install.sh BINARY
# DESTDIR goes before every path (for packagers); PREFIX is /usr unless given, SYSCONFDIR /etc.
# An existing configuration is never touched.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
binary=${1:?usage: scripts/install.sh BINARY}
dest=${DESTDIR:-}
prefix=${PREFIX:-/usr}
etc=${SYSCONFDIR:-/etc}/weighbridge

# The unit and the upgrade command name the binary and the configuration by path: both follow PREFIX and SYSCONFDIR.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unit=$work/weighbridge.service
upgrade=$work/weighbridge-upgrade
for file in "$root/systemd/weighbridge.service" "$root/scripts/weighbridge-upgrade"; do
  sed -e "s|/usr/bin/weighbridge|$prefix/bin/weighbridge|g" \
      -e "s|/usr/share/doc|$prefix/share/doc|g" \
      -e "s|/etc/weighbridge|$etc|g" "$file" >"$work/$(basename "$file")"
done

install -Dm755 "$binary" "$dest$prefix/bin/weighbridge"
install -Dm755 "$upgrade" "$dest$prefix/bin/weighbridge-upgrade"
install -Dm644 "$unit" "$dest$prefix/lib/systemd/system/weighbridge.service"
install -Dm644 "$root/systemd/weighbridge.sysusers" "$dest$prefix/lib/sysusers.d/weighbridge.conf"
install -Dm644 "$root/systemd/weighbridge.tmpfiles" "$dest$prefix/lib/tmpfiles.d/weighbridge.conf"
install -Dm644 -t "$dest$prefix/share/doc/weighbridge" "$root"/README.md "$root"/LICENSE "$root"/docs/*.md
install -Dm644 "$root/conf/weighbridge.yaml" "$dest$prefix/share/doc/weighbridge/weighbridge.example.yaml"
if [ ! -e "$dest$etc/weighbridge.yaml" ]; then
  install -Dm640 "$root/conf/weighbridge.yaml" "$dest$etc/weighbridge.yaml"
fi

if [ -z "$dest" ] && [ "$(id -u)" = 0 ] && command -v systemd-sysusers >/dev/null 2>&1; then
  systemd-sysusers "$prefix/lib/sysusers.d/weighbridge.conf"
  systemd-tmpfiles --create "$prefix/lib/tmpfiles.d/weighbridge.conf"
  if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
fi
echo "installed $dest$prefix/bin/weighbridge; edit $dest$etc/weighbridge.yaml, then: systemctl enable --now weighbridge"
