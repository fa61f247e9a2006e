#!/bin/sh
# rotate.sh FOLDER KEEP: of each program's logs, keep the newest KEEP and delete the others.
folder=$1
keep=$2

cd $folder

for file in $(ls *.log); do
    program=$(echo $file | cut -d - -f 1)
    newer=$(ls | grep $program | wc -l)
    if [ $newer -gt $keep ]; then
        rm $file
    fi
done
