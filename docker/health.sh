#!/bin/sh
# health.sh [FILE]: succeeds if the container's server answers, at the host and port of its command.
# FILE: the command's arguments, each with a NUL at its end; by default those of the container's first process.
arguments=${1:-/proc/1/cmdline}
value_of() {
    tr '\0' '\n' <"$arguments" | sed -n "s/^--$1=//p; /^--$1\$/{n;p;}"
}
host=$(value_of host)
port=$(value_of port)
case $host in
    '' | 0.0.0.0 | ::) host=localhost ;;
    *:*) host="[$host]" ;;
esac
exec curl --fail --silent "http://$host:${port:-8000}/health"
