#!/bin/sh
cat >/app/rotate.sh <<'SCRIPT'
#!/bin/sh
# rotate.sh FOLDER KEEP: of each program's logs, keep the newest KEEP and delete the others.
[ $# -eq 2 ] && [ -d "$1" ] || exit 2
case $2 in
'' | *[!0-9]*) exit 2 ;;
esac
keep=$2
cd "$1" || exit 2

is_log() {
    [ -f "$1" ] || return 1
    case $1 in
    *-[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9].log) return 0 ;;
    esac
    return 1
}

for file in *; do
    is_log "$file" || continue
    program=${file%-*}
    newer=0
    for other in *; do
        if is_log "$other" && [ "${other%-*}" = "$program" ]; then
            date=${file##*-}
            other_date=${other##*-}
            [ "${other_date%.log}" -gt "${date%.log}" ] && newer=$((newer + 1))
        fi
    done
    # The newer ones are all still there: a program's logs are met from the oldest to the newest.
    [ "$newer" -lt "$keep" ] || rm -- "./$file"
done
exit 0
SCRIPT
