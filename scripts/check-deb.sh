#!/usr/bin/env bash
# Unpacks a Debian package and looks at what it would do to a machine: scripts/check-deb.sh PACKAGE
# Without root and without installing it: files and their modes, the unit by systemd's own check, the maintainer scripts,
# and the binary with the configuration that comes with it.
set -euo pipefail
package=${1:?usage: scripts/check-deb.sh PACKAGE}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "check-deb: $*" >&2; exit 1; }

dpkg-deb --extract "$package" "$work/root"
dpkg-deb --control "$package" "$work/control"

while read -r mode path; do
  found=$(stat --format=%a "$work/root/$path" 2>/dev/null) || fail "$path is missing"
  [ "$found" = "$mode" ] || fail "$path has mode $found, not $mode"
done <<'FILES'
755 usr/bin/weighbridge
755 usr/bin/weighbridge-upgrade
644 usr/lib/systemd/system/weighbridge.service
644 usr/lib/sysusers.d/weighbridge.conf
644 usr/lib/tmpfiles.d/weighbridge.conf
644 usr/share/doc/weighbridge/README.md
644 usr/share/doc/weighbridge/operations.md
644 usr/share/doc/weighbridge/weighbridge.example.yaml
640 etc/weighbridge/weighbridge.yaml
FILES
grep -qx /etc/weighbridge/weighbridge.yaml "$work/control/conffiles" || fail "the configuration is no conffile"

for script in postinst prerm postrm; do
  sh -n "$work/control/$script" || fail "$script is no shell script"
  grep -q '#DEBHELPER#' "$work/control/$script" && fail "$script was left unfinished"
done
grep -q 'systemd-sysusers' "$work/control/postinst" || fail "postinst makes no user"
# An upgrade of the package leaves the running process alone.
grep -Eq 'deb-systemd-invoke[^|]*(restart|stop)' "$work/control/postinst" && fail "postinst restarts the service"

mkdir -p "$work/root/bin"
cp /bin/kill "$work/root/bin/kill"
said=$(systemd-analyze verify --root="$work/root" --man=no --recursive-errors=no /usr/lib/systemd/system/weighbridge.service 2>&1) ||
  fail "systemd-analyze: $said"
[ -z "$said" ] || fail "systemd-analyze: $said"

"$work/root/usr/bin/weighbridge" --version | grep -q '^weighbridge ' || fail "its binary does not say what it is"
echo "check-deb: $(basename "$package") has every part, modes, scripts and unit as they should be"
