/* PID 1 of a node's machine: opens the root that the kernel's command line names, and starts one program in it.
 *
 * The command line has cloister.verity=BLOCKS:ROOT_HASH:SALT, numbers of 4096 bytes and hex. The first disk holds that many
 * blocks of squashfs and, behind them, the hash tree (dm-verity, version 1, no superblock). A block that does not fit to the
 * hash ends the machine. There is no other way in: no shell, no console, no option. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/dm-ioctl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#define DISK "/dev/vda"
#define MODULES "/modules"
#define MAX_MODULES 64
#define DISK_DEADLINE_MS 30000

static char *const PROGRAM[] = {"/usr/bin/python3.11", "-I", "-B", "/usr/lib/cloister/start.py", NULL};
static char *const ENVIRONMENT[] = {"HOME=/tmp", "LANG=C.UTF-8", "PATH=/usr/bin", "PYTHONDONTWRITEBYTECODE=1", NULL};

static _Noreturn void end(const char *what) {
    fprintf(stderr, "node: %s: %s; the machine ends\n", what, errno ? strerror(errno) : "it is not as it should be");
    sync();
    reboot(RB_POWER_OFF);
    for (;;) pause();
}

static void attach(const char *type, const char *at, unsigned long flags, const char *options) {
    mkdir(at, 0755);
    if (mount(type, at, type, flags, options) != 0) end(at);
}

/* Modules are named 00-..., 01-... in the order in which they depend on each other. Those of other hardware fail, and may. */
static void load_modules(void) {
    struct dirent **names;
    int number = scandir(MODULES, &names, NULL, alphasort);
    if (number < 0 || number > MAX_MODULES) end(MODULES);
    for (int i = 0; i < number; i++) {
        char path[300];
        if (names[i]->d_name[0] == '.') continue;
        snprintf(path, sizeof path, MODULES "/%s", names[i]->d_name);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0) end(path);
        if (syscall(SYS_finit_module, file, "", 0) != 0 && errno != ENODEV && errno != EEXIST)
            fprintf(stderr, "node: %s: %s\n", path, strerror(errno));
        close(file);
    }
}

static void await_disk(void) {
    struct stat found;
    for (int waited = 0; stat(DISK, &found) != 0; waited += 20) {
        if (waited >= DISK_DEADLINE_MS) end("no disk " DISK);
        usleep(20 * 1000);
    }
}

static int is_hex(const char *text) { return strlen(text) == 64 && strspn(text, "0123456789abcdef") == 64; }

static void read_verity(unsigned long long *blocks, char *hash, char *salt) {
    char line[4096] = "";
    int file = open("/proc/cmdline", O_RDONLY | O_CLOEXEC);
    if (file < 0 || read(file, line, sizeof line - 1) <= 0) end("/proc/cmdline");
    close(file);
    char *given = strstr(line, "cloister.verity=");
    errno = 0;
    if (given == NULL || sscanf(given, "cloister.verity=%llu:%64[0-9a-f]:%64[0-9a-f]", blocks, hash, salt) != 3 ||
        *blocks == 0 || *blocks > 1ull << 32 || !is_hex(hash) || !is_hex(salt))
        end("the command line has no cloister.verity=BLOCKS:ROOT_HASH:SALT");
}

static struct dm_ioctl *ask_mapper(int control, unsigned long request, struct dm_ioctl *message, size_t size) {
    message->version[0] = DM_VERSION_MAJOR;
    message->data_size = size;
    message->data_start = sizeof *message;
    strcpy(message->name, "root");
    if (ioctl(control, request, message) != 0) end("device mapper");
    return message;
}

static void open_root(void) {
    static union {
        struct dm_ioctl message;
        char bytes[4096];
    } all;
    unsigned long long blocks;
    char hash[65], salt[65];
    read_verity(&blocks, hash, salt);
    int control = open("/dev/mapper/control", O_RDWR | O_CLOEXEC);
    if (control < 0) end("/dev/mapper/control");
    ask_mapper(control, DM_DEV_CREATE, &all.message, sizeof all);

    memset(&all, 0, sizeof all);
    struct dm_target_spec *target = (void *)(all.bytes + sizeof all.message);
    all.message.target_count = 1;
    all.message.flags = DM_READONLY_FLAG;
    target->length = blocks * 8;
    strcpy(target->target_type, "verity");
    char *parameters = (char *)(target + 1);
    size_t room = sizeof all - (parameters - all.bytes);
    int length = snprintf(parameters, room, "1 " DISK " " DISK " 4096 4096 %llu %llu sha256 %s %s 1 panic_on_corruption", blocks,
                          blocks, hash, salt);
    target->next = sizeof *target + ((length + 8) & ~7);
    ask_mapper(control, DM_TABLE_LOAD, &all.message, sizeof all);

    memset(&all, 0, sizeof all);
    ask_mapper(control, DM_DEV_SUSPEND, &all.message, sizeof all); /* without its flag this resumes */
    close(control);
    mkdir("/root", 0755);
    if (mount("/dev/dm-0", "/root", "squashfs", MS_RDONLY | MS_NODEV | MS_NOSUID, NULL) != 0) end("root");
    printf("node: root %s is open, %llu blocks\n", hash, blocks);
}

static void enter_root(void) {
    if (chdir("/root") != 0 || mount(".", "/", NULL, MS_MOVE, NULL) != 0 || chroot(".") != 0 || chdir("/") != 0) end("root");
    attach("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    attach("sysfs", "/sys", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    attach("devtmpfs", "/dev", MS_NOSUID | MS_NOEXEC, NULL);
    attach("tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=1777");
    attach("tmpfs", "/run", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=755");
    attach("tmpfs", "/tmp", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=1777");
    if (mount("configfs", "/sys/kernel/config", "configfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) != 0) end("configfs");
}

static void set(const char *name, const char *value) {
    int file = open(name, O_WRONLY | O_CLOEXEC);
    if (file < 0 || write(file, value, strlen(value)) < 0) end(name);
    close(file);
}

static void close_kernel(void) {
    set("/proc/sys/kernel/modules_disabled", "1");
    set("/proc/sys/kernel/kexec_load_disabled", "1");
    set("/proc/sys/kernel/sysrq", "0");
    set("/proc/sys/kernel/yama/ptrace_scope", "3");
    set("/proc/sys/kernel/kptr_restrict", "2");
    struct rlimit none = {0, 0}, all = {RLIM_INFINITY, RLIM_INFINITY};
    if (setrlimit(RLIMIT_CORE, &none) != 0 || setrlimit(RLIMIT_MEMLOCK, &all) != 0) end("limits");
}

int main(void) {
    if (getpid() != 1) return 1;
    attach("devtmpfs", "/dev", MS_NOSUID | MS_NOEXEC, NULL);
    attach("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    load_modules();
    await_disk();
    open_root();
    enter_root();
    close_kernel();
    pid_t program = fork();
    if (program == 0) {
        setsid();
        execve(PROGRAM[0], PROGRAM, ENVIRONMENT);
        end(PROGRAM[0]);
    }
    for (int status;;) {
        pid_t ended = wait(&status);
        if (ended == program || (ended < 0 && errno == ECHILD)) {
            fprintf(stderr, "node: the program ended with %d; the machine ends\n", WEXITSTATUS(status));
            sync();
            reboot(RB_POWER_OFF);
        }
    }
}
