#!/bin/sh
# serve.sh DEVICE ARGUMENT...: `espalier serve` with the image's flags.
# A flag may be given once.  So the image's are left out where the arguments have their own.
device="--device=$1"
host="--host=0.0.0.0"
shift
for argument; do
    case $argument in
        --device | --device=*) device= ;;
        --host | --host=*) host= ;;
    esac
done
# exec: SIGTERM reaches the server, which drains.
# shellcheck disable=SC2086  (unquoted: an empty one is no argument)
exec espalier serve --log-json $host $device "$@"
