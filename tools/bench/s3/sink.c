/* A server with as much of S3's protocol as tools/bench/s3_client.py needs, that costs next to nothing itself.
 *
 *     s3_sink PATTERN
 *
 * It prints its port. What is put it drops in the kernel. What is got it sends from the page cache: the file PATTERN,
 * again and again; the object's size is the number that its key ends with (file-1048576). It knows nothing else of
 * objects and refuses nothing.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST 65536
#define XML "<?xml version=\"1.0\" encoding=\"UTF-8\"?>"
#define NAMESPACE " xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\""
#define ETAG "ETag: \"0123456789abcdef0123456789abcdef\"\r\n"
#define DATED "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nAccept-Ranges: bytes\r\n"

static int pattern;
static long pattern_bytes;

static int send_all(int socket, const char *data, size_t length) {
    while (length) {
        ssize_t sent = send(socket, data, length, 0);
        if (sent <= 0) return -1;
        data += sent, length -= sent;
    }
    return 0;
}

static int reply(int socket, const char *headers, const char *body) {
    char text[4096];
    int length = snprintf(text, sizeof text, "HTTP/1.1 200 OK\r\n%sContent-Length: %zu\r\n\r\n%s", headers, strlen(body),
                          body);
    return send_all(socket, text, length);
}

/* The value of a header, or NULL; names are compared without regard to case. */
static const char *header(const char *head, const char *name) {
    size_t length = strlen(name);
    for (const char *line = strstr(head, "\r\n"); line && line[2] != '\r'; line = strstr(line + 2, "\r\n"))
        if (!strncasecmp(line + 2, name, length) && line[2 + length] == ':')
            return line + 3 + length + strspn(line + 3 + length, " ");
    return NULL;
}

/* Take `length` bytes from the connection and drop them, uncopied. */
static int drop(int socket, long length) {
    static char nowhere[1];
    while (length > 0) {
        ssize_t got = recv(socket, nowhere, length < 1 << 30 ? length : 1 << 30, MSG_TRUNC);
        if (got <= 0) return -1;
        length -= got;
    }
    return 0;
}

static int send_range(int socket, const char *range, long size, int with_body) {
    long first = 0, last = size - 1;
    char text[512], found[128] = "";
    if (range) {
        sscanf(range, "bytes=%ld-%ld", &first, &last);
        last = last < size - 1 ? last : size - 1;
        snprintf(found, sizeof found, "Content-Range: bytes %ld-%ld/%ld\r\n", first, last, size);
    }
    int length = snprintf(text, sizeof text, "HTTP/1.1 %s\r\n" ETAG DATED "%sContent-Length: %ld\r\n\r\n",
                          range ? "206 Partial Content" : "200 OK", found, last + 1 - first);
    if (send(socket, text, length, with_body ? MSG_MORE : 0) != length) return -1;
    while (with_body && first <= last) {
        off_t at = first % pattern_bytes;
        long count = last + 1 - first < pattern_bytes - at ? last + 1 - first : pattern_bytes - at;
        ssize_t sent = sendfile(socket, pattern, &at, count);
        if (sent <= 0) return -1;
        first += sent;
    }
    return 0;
}

static int answer(int socket, const char *head) {
    char method[16], target[2048], key[2048];
    if (sscanf(head, "%15s %2047s", method, target) != 2) return -1;
    snprintf(key, sizeof key, "%s", target);
    key[strcspn(key, "?")] = 0;
    const char *query = target + strlen(key), *size = strrchr(key, '-');
    if (!strcmp(method, "GET") || !strcmp(method, "HEAD"))
        return send_range(socket, header(head, "Range"), size ? atol(size + 1) : 0, *method == 'G');
    if (!strcmp(method, "POST") && strstr(query, "uploadId="))
        return reply(socket, "Content-Type: application/xml\r\n",
                     XML "<CompleteMultipartUploadResult" NAMESPACE "><ETag>&quot;0-1&quot;</ETag>"
                         "</CompleteMultipartUploadResult>");
    if (!strcmp(method, "POST"))
        return reply(socket, "Content-Type: application/xml\r\n",
                     XML "<InitiateMultipartUploadResult" NAMESPACE "><UploadId>upload</UploadId>"
                         "</InitiateMultipartUploadResult>");
    return reply(socket, ETAG, "");
}

static void *serve(void *argument) {
    int socket = (int)(long)argument, one = 1;
    char head[MOST + 1];
    size_t held = 0;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    for (;;) {
        char *end;
        while (head[held] = 0, !(end = strstr(head, "\r\n\r\n"))) {
            ssize_t got = held < MOST ? recv(socket, head + held, MOST - held, 0) : 0;
            if (got <= 0) goto over;
            held += got;
        }
        *end = 0, end[1] = 0; /* header() stops here */
        const char *length = header(head, "Content-Length"), *expect = header(head, "Expect");
        long body = length ? atol(length) : 0, here = held - (end + 4 - head);
        here = here < body ? here : body;
        if (expect && send_all(socket, "HTTP/1.1 100 Continue\r\n\r\n", 25)) goto over;
        if (drop(socket, body - here) || answer(socket, head)) goto over;
        held -= end + 4 + here - head;
        memmove(head, end + 4 + here, held);
    }
over:
    close(socket);
    return NULL;
}

int main(int count, char **arguments) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    struct stat about;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    pattern = count == 2 ? open(arguments[1], O_RDONLY) : -1;
    if (pattern < 0 || fstat(pattern, &about) || listener < 0 || bind(listener, (void *)&address, length) ||
        listen(listener, 1024) || getsockname(listener, (void *)&address, &length)) {
        perror("s3_sink PATTERN");
        return 1;
    }
    pattern_bytes = about.st_size;
    signal(SIGPIPE, SIG_IGN);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    for (;;) {
        pthread_t thread;
        int connection = accept(listener, NULL, NULL);
        if (connection >= 0 && !pthread_create(&thread, NULL, serve, (void *)(long)connection)) pthread_detach(thread);
    }
}
